package config

import (
	"fmt"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// Summary describes what each bucket of l, a limit of c, enforces.
func (c *Config) Summary(l *shaper.Limit) string {
	var parts []string
	switch {
	case l.Block:
		return "block"
	case l.Shed.Any():
		return "shed: " + shedText(&l.Shed)
	}
	if l.Rate != 0 {
		s := FormatRate(l.Rate)
		if l.Overhead > 0 {
			s += " with " + FormatSize(uint64(l.Overhead)) + " a packet"
		}
		if l.Burst > 0 {
			s += " burst " + FormatSize(l.Burst)
		}
		parts = append(parts, s)
	}
	if l.Packets.N != 0 {
		s := FormatFrequency(l.Packets) + " packets"
		if l.BurstPackets > 0 {
			s += " burst " + strconv.FormatUint(l.BurstPackets, 10)
		}
		parts = append(parts, s)
	}
	if l.Paces() {
		parts = append(parts, "queue "+l.MaxDelay.String())
	}
	if l.MaxConnections != 0 {
		least := ""
		if l.Adapt == shaper.AdaptOn {
			least = fmt.Sprintf("%d to ", l.MinConnections)
		}
		unit := "connections"
		if l.SlotFor.InTurns() {
			unit = l.SlotFor.String() + "s at once"
		}
		parts = append(parts, fmt.Sprintf("%s%d %s", least, l.MaxConnections, unit))
	}
	if l.NewConnections.N != 0 {
		s := FormatFrequency(l.NewConnections) + " new connections"
		if l.Algorithm != shaper.LeakyBucket {
			s += " by " + l.Algorithm.String()
		}
		if l.BurstConnections > 0 {
			s += " burst " + strconv.FormatUint(l.BurstConnections, 10)
		}
		parts = append(parts, s)
	}
	if l.MaxConnections != 0 && !l.InPacketPlane() || l.NewConnections.N != 0 {
		parts = append(parts, "wait "+l.QueueTimeout.String())
	}
	if l.Quota.Amount > 0 {
		parts = append(parts, quotaText(l))
	}
	if y := l.Penalty; y != nil {
		s := "penalty of " + FormatDuration(y.Block) + " after " + FormatFrequency(y.After) + " refused"
		if y.Observe {
			s += ", which observes"
		}
		parts = append(parts, s)
	}
	if len(l.For) > 0 {
		var names []string
		for i := range l.For {
			names = append(names, l.For[i].Group)
		}
		parts = append(parts, "other values for "+strings.Join(names, ", "))
	}
	if len(l.BySource) > 0 {
		parts = append(parts, fmt.Sprintf("other values for %d prefixes", len(l.BySource)))
	}
	if len(l.Turns) > 0 {
		parts = append(parts, "turns by "+turnsKey.textOf(l))
	}
	if len(l.Reserve) > 0 {
		parts = append(parts, "reserved: "+reserveText(l))
	}
	if l.Shared {
		parts = append(parts, fmt.Sprintf("shared by %d hosts", c.Shared.Hosts))
	}
	return strings.Join(parts, ", ")
}
