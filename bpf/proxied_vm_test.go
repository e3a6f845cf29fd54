//go:build vmguest

package bpf

import (
	"fmt"
	"testing"

	"shaperd.dev/shaperd/shaper"
)

// TestVMProxied_NotCounted repeats the test with mode "shape": at ingress the limits are enforced at the IFB.
func TestVMProxied_NotCounted(t *testing.T) {
	for _, ingress := range []bool{true, false} {
		for version, net := range routerNets {
			t.Run(fmt.Sprint(direction(ingress), " ", version), func(t *testing.T) {
				testProxied(t, net, shaper.Attachment{Direction: direction(ingress), Mode: shaper.AttachShape, Queue: 5000})
			})
		}
	}
}
