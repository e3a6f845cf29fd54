package config

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestLoad_Compiles generates files of random keys: each loads and compiles, or is
// refused with mistakes at valid positions.
func TestLoad_Compiles(t *testing.T) {
	values := map[string][]string{
		"match.listen": {`"db"`, `["db"]`, `["sms"]`, `["db", "sms"]`}, "match.protocol": {`"tcp"`, `"udp"`, `"icmp"`},
		"match.attach": {`"up"`, `["up"]`, `["down"]`, `["up", "down"]`}, "match.destination": {`"10.0.0.5"`, `["10.0.0.0/8"]`, `["::/0"]`},
		"match.source": {`"10.0.0.1"`, `"2001:db8::1"`, `["10.0.0.0/8"]`, `["::/0"]`, `["0.0.0.0/0", "2001:db8::/32"]`}, "match.asn": {`[]`, `[64500]`, `"AS64500"`},
		"match.port": {`5432`, `"8000-8005"`, `["5432"]`, `["8000-8005", "1"]`, `["1-65535"]`},
		"key":        {`[]`, `"source"`, `["source"]`, `["asn", "port"]`, `["connection"]`, `["listen"]`, `["attach"]`}, "ipv4_prefix": {"1", "32"}, "ipv6_prefix": {"1", "128"},
		"direction": {`"both"`, `"from-downstream"`}, "observe": {"true", "false"}, "refuse_with": {`"close"`, `"drop"`, `"reset"`, `"reject"`}, "overhead": {`"0B"`, `"1kB"`}, "ecn_mark": {`"1%"`},
		"rate": {`"1B/s"`, `"1Tbit/s"`, `"10Mbit/s"`}, "packets": {`"1/h"`, `"1000000000/s"`}, "max_connections": {"1", "1048576"}, "new_connections": {`"1/h"`, `"1000000000/s"`},
		"burst": {`"0B"`, `"2592000B"`, `"2592001B"`, `"1000000TB"`, `"324PB"`, `"324000TB"`}, "burst_packets": {"0", "720", "721", "1000000000000"},
		"max_delay": {`"0s"`, `"1h"`}, "queue_timeout": {`"0s"`, `"1h"`}, "max_queue": {"0", "1048576"}, "block": {"true", "false"}, "shared": {"true", "false"},
		"algorithm": {`"leaky"`, `"fixed-window"`, `"sliding-window"`, `"sliding-log"`}, "burst_connections": {"0", "1", "1000"},
		"quota": {`"1B/day"`, `"100GB/month UTC"`, `"5packets/1min"`, `"1000000connections/24h"`}, "quota_over": {`"refuse"`, `"slow:1B/s"`},
		"reserve": {`{ default = "20%" }`, `{ c0 = "50%" }`, `{ c0 = "1%", default = "99%" }`}, "turns": {`["prefix24", "source"]`, `["asn", "prefix24", "source"]`, `"source"`},
		"match.group": {`"g"`, `["g", "h"]`}, "except": {`{ group = "g" }`, `{ source = ["10.0.0.0/8"], group = ["h"] }`, `{ asn = 64500 }`}, "values": {`"v.csv"`},
		"for": {`{ g = { rate = "1Mbit/s" } }`, `{ g = { rate = "1B/s", burst = "2MB" }, h = { rate = "2Mbit/s" } }`, `{ h = { max_connections = 5, new_connections = "2000/h" } }`, `{ g = { packets = "5/s", burst_packets = 1 } }`},
	}
	var keys []string
	for key := range values {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	loaded, refused, ofAttachments, shared, tiered, classes := 0, 0, 0, 0, 0, 0
	check := func(t *rapid.T) {
		var b strings.Builder
		b.WriteString(listenDB + "[[listen]]\nname = \"sms\"\naddress = [\"udp://0.0.0.0:2775\"]\ndownstream = [\"sms.local\"]\n")
		if rapid.IntRange(0, 9).Draw(t, "instances") == 9 {
			b.WriteString("instances = 2\n")
		}
		b.WriteString("[[attach]]\nname = \"up\"\ninterface = \"eth0\"\n[[attach]]\nname = \"down\"\ninterface = \"eth0\"\ndirection = \"ingress\"\n")
		attached, group := rapid.Bool().Draw(t, "attached"), rapid.Bool().Draw(t, "group")
		if group {
			b.WriteString("[shared]\nhosts = 4\n")
		}
		if rapid.Bool().Draw(t, "groups") {
			fmt.Fprintf(&b, "[[group]]\nname = \"g\"\nsource = [\"10.0.0.0/8\"]\n[[group]]\nname = \"h\"\nsource = [\"10.0.0.0/%d\"]\nfile = \"h.txt\"\n", rapid.IntRange(8, 25).Draw(t, "bits"))
			b.WriteString("[[limit]]\nname = \"of-groups\"\nexcept.group = [\"g\", \"h\"]\nrate = \"1MB/s\"\nmatch.listen = [\"db\"]\n")
			b.WriteString("[[limit]]\nname = \"tiers\"\nmatch.listen = [\"db\"]\nkey = [\"source\"]\n")
			fmt.Fprintf(&b, "for = %s\nrate = \"1MB/s\"\nipv4_prefix = %d\n", rapid.SampledFrom(values["for"]).Draw(t, "of groups"), rapid.SampledFrom([]int{8, 24, 32}).Draw(t, "prefix"))
			for _, key := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"max_connections", "new_connections", "burst_connections", "algorithm", "burst"}), 0, 4, rapid.ID).Draw(t, "tiered") {
				fmt.Fprintf(&b, "%s = %s\n", key, rapid.SampledFrom(values[key]).Draw(t, key))
			}
		}
		for i := range rapid.IntRange(0, 2).Draw(t, "classes") {
			fmt.Fprintf(&b, "[[class]]\nname = \"c%d\"\nweight = %d\n", i, rapid.IntRange(1, 100).Draw(t, "weight"))
			for _, key := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"match.listen", "match.source", "match.port", "match.asn", "match.group"}), 1, 3, rapid.ID).Draw(t, "class") {
				fmt.Fprintf(&b, "%s = %s\n", key, rapid.SampledFrom(values[key]).Draw(t, key))
			}
		}
		if rapid.Bool().Draw(t, "asn") {
			b.WriteString("[asn]\nfiles = [\"asn.csv\"]\n")
		}
		for i := range rapid.IntRange(1, 2).Draw(t, "limits") {
			fmt.Fprintf(&b, "[[limit]]\nname = \"l%d\"\n", i)
			// A limit has something to hold to, and a few keys more.
			some := rapid.SliceOfNDistinct(rapid.SampledFrom(keys), 0, 3, rapid.ID).Draw(t, "keys")
			main := rapid.SampledFrom([]string{"rate", "packets", "max_connections", "new_connections", "quota", "block"}).Draw(t, "main")
			if !slices.Contains(some, main) {
				some = append(some, main)
			}
			if attached && !slices.Contains(some, "match.attach") {
				some = append(some, "match.attach")
			}
			if group && !slices.Contains(some, "shared") {
				some = append(some, "shared")
			}
			for _, key := range some {
				fmt.Fprintf(&b, "%s = %s\n", key, rapid.SampledFrom(values[key]).Draw(t, key))
			}
		}
		if rapid.Bool().Draw(t, "override") {
			key := rapid.SampledFrom(slices.DeleteFunc(OverrideKeys(), func(key string) bool { return values[key] == nil })).Draw(t, "overridden")
			fmt.Fprintf(&b, "[[override]]\nlimit = \"l0\"\n%s = %s\n", key, rapid.SampledFrom(values[key]).Draw(t, "to"))
		}
		c, err := load([]*file{newFile("f.toml", 0, b.String())})
		if err != nil {
			refused++
			return
		}
		loaded++
		if c.Limits[0].InPacketPlane() {
			ofAttachments++
		}
		if c.Shared.Hosts > 0 {
			shared++
		}
		for i := range c.Limits {
			if c.Limits[i].HasTiers() {
				tiered++
			}
		}
		classes += len(c.Classes)
		compile(t, c)
		if _, err := json.Marshal(c.Canonical()); err != nil {
			t.Fatal(err)
		}
	}
	for range 10 { // 100 files each: most are refused
		rapid.Check(t, check)
	}
	t.Logf("%d loaded, %d were refused", loaded, refused)
	if shared == 0 || classes == 0 || tiered == 0 || ofAttachments == 0 || ofAttachments == loaded || refused == 0 {
		t.Errorf("%d loaded, %d of them for attachments, %d shared, %d with tiers, %d classes, %d were refused: want some of all", loaded, ofAttachments, shared, tiered, classes, refused)
	}
}
