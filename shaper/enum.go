package shaper

// enumName returns the name of a value of an enumeration, or "???".
func enumName[E ~uint8](v E, names ...string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return "???"
}
