//go:build vmguest

package bpf

import (
	"fmt"
	"testing"
)

// TestVMProxied_NotCounted repeats the test with mode "shape": at ingress the limits are enforced at the IFB.
func TestVMProxied_NotCounted(t *testing.T) {
	for _, ingress := range []bool{true, false} {
		for version, net := range routerNets {
			t.Run(fmt.Sprint(direction(ingress), " ", version), func(t *testing.T) {
				testProxied(t, net, Attachment{Ingress: ingress, Mode: Shape, Queue: 5000})
			})
		}
	}
}
