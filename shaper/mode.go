package shaper

// ModeName returns the name of a mode: what observes enforces nothing.
func ModeName(observe bool) string {
	if observe {
		return "observe"
	}
	return "enforce"
}
