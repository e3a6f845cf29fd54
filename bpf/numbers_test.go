package bpf

import (
	"testing"

	"shaperd.dev/shaperd/shaper"
)

// TestNumbers_OfPackageShaper compares numbers that the programs and package shaper share.
func TestNumbers_OfPackageShaper(t *testing.T) {
	for _, n := range []struct {
		name      string
		ours, its int
	}{
		{"PASS", int(kernelVerdictVERDICT_PASS), int(shaper.Pass)},
		{"DELAY", int(kernelVerdictVERDICT_DELAY), int(shaper.Delay)},
		{"REFUSE", int(kernelVerdictVERDICT_REFUSE), int(shaper.Refuse)},

		{"NONE", int(kernelReasonREASON_NONE), int(shaper.None)},
		{"RATE", int(kernelReasonREASON_RATE), int(shaper.ByRate)},
		{"QUEUE_FULL", int(kernelReasonREASON_QUEUE_FULL), int(shaper.QueueFull)},
		{"CONNECTIONS", int(kernelReasonREASON_CONNECTIONS), int(shaper.ByConnections)},
		{"NEW", int(kernelReasonREASON_NEW), int(shaper.ByNewConnections)},
		{"WAIT_TIMEOUT", int(kernelReasonREASON_WAIT_TIMEOUT), int(shaper.WaitTimeout)},
		{"WAITING_FULL", int(kernelReasonREASON_WAITING_FULL), int(shaper.WaitingFull)},
		{"CLIENT_GONE", int(kernelReasonREASON_CLIENT_GONE), int(shaper.ClientGone)},
		{"MEMORY_FULL", int(kernelReasonREASON_MEMORY_FULL), int(shaper.MemoryFull)},
		{"BLOCKED", int(kernelReasonREASON_BLOCKED), int(shaper.Blocked)},
		{"FLOW_CLOSED", int(kernelReasonREASON_FLOW_CLOSED), int(shaper.FlowClosed)},
		{"SHED", int(kernelReasonREASON_SHED), int(shaper.ShedLoad)},
		{"QUOTA_USED", int(kernelReasonREASON_QUOTA_USED), int(shaper.QuotaUsed)},
		{"reasons", int(kernelReasonREASON_QUOTA_USED) + 1, shaper.NumReasons},

		{"OTHER", int(kernelProtocolPROTOCOL_OTHER), int(shaper.AnyProtocol)},
		{"TCP", int(kernelProtocolPROTOCOL_TCP), int(shaper.TCP)},
		{"UDP", int(kernelProtocolPROTOCOL_UDP), int(shaper.UDP)},
		{"ICMP", int(kernelProtocolPROTOCOL_ICMP), int(shaper.ICMP)},

		{"SOURCE", int(kernelKeyFieldKEY_SOURCE), int(shaper.KeySource)},
		{"ASN", int(kernelKeyFieldKEY_ASN), int(shaper.KeyASN)},
		{"PORT", int(kernelKeyFieldKEY_PORT), int(shaper.KeyPort)},
		{"CONNECTION", int(kernelKeyFieldKEY_CONNECTION), int(shaper.KeyConnection)},
		{"ATTACH", int(kernelKeyFieldKEY_ATTACH), int(shaper.KeyAttach)},
		{"DESTINATION", int(kernelKeyFieldKEY_DESTINATION), int(shaper.KeyDestination)},

		{"COUNTRY", int(kernelKeyFieldKEY_COUNTRY), int(shaper.KeyCountry)},
		{"limits", len(kernelPolicy{}.Limit), shaper.MaxLimits},
		{"codepoints", len(kernelPolicy{}.Dscp), shaper.NumDSCP},
		{"control groups of two policies", len(kernelPolicy{}.Cgroup), 2 * shaper.MaxCgroups},
		{"masks of marks", len(kernelPolicy{}.MarkMask), shaper.MaxMarkMasks},
		{"slots of a connection", len(kernelConn{}.Slot), shaper.MaxConnectionLimits},
		{"classes of delay", len(kernelCounters{}.DelayHist), len(shaper.HistogramBounds) + 1},
	} {
		if n.ours != n.its {
			t.Errorf("%s is %d in the programs, %d in package shaper", n.name, n.ours, n.its)
		}
	}
}
