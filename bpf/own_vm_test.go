//go:build vmguest

package bpf

import (
	"fmt"
	"testing"
)

// TestVMOwn shapes: at ingress packets meet the limits behind a detour.
func TestVMOwn(t *testing.T) {
	for _, ingress := range []bool{true, false} {
		for version, net := range ownNets {
			t.Run(fmt.Sprint(way(ingress), " ", version), func(t *testing.T) {
				testOwn(t, net, Attachment{Ingress: ingress, Mode: Shape, Queue: 5000})
			})
		}
	}
}
