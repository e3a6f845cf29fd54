package bpf

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// TestRegistry_StoredForm pins the form in which another version of shaperd finds the registry.
func TestRegistry_StoredForm(t *testing.T) {
	const stored = `{"Format":1,"Hashes":[HASHES],"Tables":{"7":1},"Generation":3,` +
		`"Limits":{"l":{"Number":2,"Rates":{"BitsPerSecond":8000,"Packets":{"N":5,"Per":1000000000},"New":{"N":0,"Per":0}},"Slotted":[20,0]}},` +
		`"Attachments":{"edge":4},` +
		`"Points":[{"Attachment":"edge","Ifindex":9,"Ingress":true,"Hook":2,"Mode":1,"Counts":true},{"Attachment":"seen","Ifindex":9,"Ingress":false,"Hook":0,"Mode":2,"Counts":false}],` +
		`"Queues":[{"Ifindex":9,"Ingress":false,"Former":[{"Kind":"fq","Handle":65536,"Parent":4294967295,"Options":"AQI="}]}],` +
		`"Clsacts":[9],"Network":{"Cookie":1,"Number":2}}`
	text := strings.Replace(stored, "HASHES", strings.Repeat("[0,0],", int(keyWords)-1)+"[0,0]", 1)
	want := registry{
		Format: 1, Tables: map[uint32]uint32{7: 1}, Generation: 3,
		Limits: map[string]*knownLimit{"l": {
			Number: 2, Rates: rates{BitsPerSecond: 8000, Packets: shaper.Frequency{N: 5, Per: time.Second}}, Slotted: slotShifts{20, 0},
		}},
		Attachments: map[string]uint32{"edge": 4},
		Points: []savedPoint{
			{Attachment: "edge", Ifindex: 9, Ingress: true, Hook: shaper.HookClsact, Mode: shaper.AttachPolice, Counts: true},
			{Attachment: "seen", Ifindex: 9, Hook: shaper.HookAuto, Mode: shaper.AttachObserve},
		},
		Queues:  []savedQueue{{Ifindex: 9, Former: attach.SavedQdiscs{{Kind: "fq", Handle: 1 << 16, Parent: 1<<32 - 1, Options: []byte{1, 2}}}}},
		Clsacts: []int{9},
		Network: network{Cookie: 1, Number: 2},
	}
	got, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(text, string(got)); diff != "" {
		t.Errorf("stored (-want +got):\n%s", diff)
	}
	var read registry
	if err := json.Unmarshal([]byte(text), &read); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, read, cmpopts.IgnoreUnexported(registry{}, attach.Qdisc{})); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
}

// A registry of another format is neither used nor deleted.
func TestRegistryFormat(t *testing.T) {
	p := openPlane(t)
	dir := p.dir
	p.kernel.Format++
	p.kernel.Clsacts = []int{1} // otherwise the pins are unused and removed
	if err := p.kernel.save(); err != nil {
		t.Fatal(err)
	}
	p.Release()
	p.Plane = nil
	defer os.RemoveAll(p.pins)
	want := dir + ` belongs to another version of shaperd: remove it with "shaperd detach" of that version, or remove the directory`
	for _, keys := range []int{p.keys, 2 * p.keys} {
		if _, err := Open(Options{Shaper: p.shaper, Clock: p.clock, PinPath: p.pins, Keys: keys}); err == nil || err.Error() != want {
			t.Errorf("open for %d keys: %v, want %s", keys, err, want)
		}
	}
	if err := Detach(p.pins); err == nil || err.Error() != want {
		t.Errorf("detach: %v, want %s", err, want)
	}
	if _, err := os.Stat(filepath.Join(dir, registrySpec.Name)); err != nil {
		t.Error(err)
	}
}
