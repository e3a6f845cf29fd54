package bpf

// Modes, as the programs number them.
const (
	modeShape = iota
	modePolice
	modeObserve
)
