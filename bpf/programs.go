// Owner: Plane.changeMu.

package bpf

import (
	"cmp"
	"math/bits"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// programs are the programs of one attachment. All its interfaces with the same kind of
// link-layer header share them: the verifier takes a tenth of a second for them, and half
// a second where packets may be under many limits.
type programs struct {
	limit   *ebpf.Program // enforces the limits
	replies *ebpf.Program // tracks the reply direction; nil when no connections are counted
	limits  uint32        // maximum number of limits that a packet may be under
}

func (p *programs) close() {
	_ = p.limit.Close()
	_ = p.replies.Close()
}

// programKey identifies programs by the parameters that they are loaded with.
type programKey struct {
	at                kernelConfig // with Since 0
	xdp               bool
	countsConnections bool // with the reply program
}

// fewLimits is the number of limits that programs are loaded for where the policy has no more:
// the cost of verification grows with it.
const fewLimits = 8

// programLimits returns the number of limits that the programs of a are loaded for under p.
func programLimits(a *shaper.Attachment, p *shaper.Policy) uint32 {
	if bits.OnesCount64(uint64(p.OriginSet(p.AttachmentIndex(a.Name)))) <= fewLimits {
		return fewLimits
	}
	return shaper.MaxLimits
}

// programKeyOf returns the key of the programs of a under p, with the numbers n, for packets with
// or without an Ethernet header.
func programKeyOf(a *shaper.Attachment, n numbers, p *shaper.Policy, ethernet bool) programKey {
	return programKey{
		at: kernelConfig{
			AttachId: n.attachments[a.Name], Mode: programModes[a.EffectiveMode()], Ethernet: u32(ethernet), Keep: u32(a.OnStop == shaper.StopKeep),
			Egress: u32(a.Direction == shaper.Egress), IdleTimeout: uint64(a.IdleTimeout), MaxLimits: programLimits(a, p), QueueLimit: uint32(a.Queue),
		},
		xdp: a.Hook == shaper.HookXDP, countsConnections: countsConnections(a, p),
	}
}

func u32(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// hasEthernet reports whether packets at l begin with an Ethernet header.
func hasEthernet(l netlink.Link) bool {
	switch l.Attrs().EncapType {
	case "ether", "loopback":
		return true
	}
	return false
}

// loadPrograms loads the programs of a key. They let everything pass until the policy of
// generation since is active.
func (k *kernel) loadPrograms(key programKey, since uint32) (*programs, error) {
	key.at.MinGeneration = since
	var tc struct {
		Limit *ebpf.Program `ebpf:"shaperd_tc"`
	}
	var xdp struct {
		Limit *ebpf.Program `ebpf:"shaperd_xdp"`
	}
	var other struct {
		Replies *ebpf.Program `ebpf:"shaperd_replies"`
	}
	var objects any = &tc
	if key.xdp {
		objects = &xdp
	}
	err := k.load(key.at, nil, objects)
	if err == nil && key.countsConnections {
		err = k.load(key.at, nil, &other)
	}
	p := &programs{limit: cmp.Or(tc.Limit, xdp.Limit), replies: other.Replies, limits: key.at.MaxLimits}
	if err != nil {
		p.close()
		return nil, explainOldKernel(explainAlignment(err))
	}
	return p, nil
}

// programCache holds the loaded programs, so that new interfaces can use them at once.
type programCache map[programKey]*programs

// get returns the programs of a key, and loads them if necessary.
func (c programCache) get(k *kernel, key programKey, since uint32) (*programs, error) {
	if p := c[key]; p != nil {
		return p, nil
	}
	p, err := k.loadPrograms(key, since)
	if err == nil {
		c[key] = p
	}
	return p, err
}

// close closes all programs. Attached programs stay.
func (c programCache) close() {
	for _, p := range c {
		p.close()
	}
	clear(c)
}

// merge moves the programs of another cache into c, replacing those of the same key.
func (c programCache) merge(other programCache) {
	for key, p := range other {
		if old := c[key]; old != nil {
			old.close()
		}
		c[key] = p
	}
	clear(other)
}

// prune closes programs that no attachment uses any more.
func (c programCache) prune(used func(programKey) bool) {
	for key, p := range c {
		if !used(key) {
			p.close()
			delete(c, key)
		}
	}
}
