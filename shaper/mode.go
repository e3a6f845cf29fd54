package shaper

// Mode is whether limits are enforced: the key observe, as it is named in the API, in metrics and
// in logs.
type Mode bool

// The modes.
const (
	Enforce Mode = false
	Observe Mode = true // verdicts are computed and counted, and have no effect
)

func (m Mode) String() string {
	if m == Observe {
		return "observe"
	}
	return "enforce"
}
