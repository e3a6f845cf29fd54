package world

import "shaperd.dev/shaperd/cluster"

// Memory is the ledger in memory.
type Memory struct{ cluster.Ledger }

// NewMemory returns an empty ledger of a process named run.
func NewMemory(run string) Ledger { return &Memory{cluster.Ledger{Run: run}} }

// Save returns a copy of the state.
func (m *Memory) Save() any { return m.Clone() }

// Load puts m into a saved state, or the empty one.
func (m *Memory) Load(state any, run string) {
	m.Ledger = cluster.Ledger{}
	if state != nil {
		m.Ledger = *state.(*cluster.Ledger).Clone()
	}
	m.Run = run
}
