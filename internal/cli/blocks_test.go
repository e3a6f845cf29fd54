package cli

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper/config"
)

// TestBlock_EnforcedInEveryMode blocks while the daemon observes, and during a bypass. "enforce"
// reports that it has no effect then.
func TestBlock_EnforcedInEveryMode(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	text := strings.Replace(configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s"), "[daemon]\n", "[daemon]\nobserve = true\n", 1)
	dns := testutil.FreeAddr(t, "udp")
	echo := testutil.ListenUDP(t, "127.0.0.1:0")
	testutil.EchoUDP(t, echo)
	text += fmt.Sprintf("[[listen]]\nname = \"dns\"\naddress = [\"udp://%s\"]\ndownstream = [%q]\n", dns, echo.LocalAddr())
	s := startControlled(t, writeConfig(t, "", text))
	client, err := net.Dial("udp4", dns)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	answered := func(within time.Duration) bool {
		t.Helper()
		if _, err := client.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		_ = client.SetReadDeadline(time.Now().Add(within))
		_, err := client.Read(make([]byte, 1))
		return err == nil
	}
	if !answered(10 * time.Second) {
		t.Fatal("no answer")
	}
	passes := func() bool {
		t.Helper()
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			return false
		}
		defer c.Close()
		return ping(c) == nil
	}
	if !passes() {
		t.Fatal("no connection")
	}
	s.must("enforce per-source", "mode observe", "NO EFFECT NOW: the daemon observes")
	s.must("block 127.0.0.1")
	if passes() || answered(50*time.Millisecond) {
		t.Error("a blocked source gets through while the daemon observes")
	}
	s.must("bypass on", "blocks stay enforced")
	if passes() || answered(50*time.Millisecond) {
		t.Error("a blocked source gets through while limits are bypassed")
	}
	s.must("enforce per-source", "NO EFFECT NOW")
	if l := s.limit(config.BlockedName); l.Mode != "enforce" || !l.Block {
		t.Errorf("the limit of blocks is %+v", l)
	}
	s.must("unblock 127.0.0.1")
	if !passes() || !answered(10*time.Second) {
		t.Error("unblocked, and no connection")
	}
}

// TestBlock_WithMaxLimits blocks when the configuration has the maximum of limits.
func TestBlock_WithMaxLimits(t *testing.T) {
	listen := testutil.FreeAddr(t, "tcp")
	text := configText(listen, "", testutil.ServeTCP(t, testutil.Echo), "1MB/s")
	for i := 1; i < config.MaxLimits; i++ {
		text += fmt.Sprintf("[[limit]]\nname = \"l%d\"\nrate = \"1GB/s\"\n", i)
	}
	s := startControlled(t, writeConfig(t, "", text))
	s.must("block 127.0.0.1", "127.0.0.1/32")
	if c, err := net.Dial("tcp4", listen); err == nil {
		if ping(c) == nil {
			t.Error("a blocked source gets through")
		}
		c.Close()
	}
}

// TestUnblock_NamesCoveringBlock unblocks an address that only a wider prefix blocks.
func TestUnblock_NamesCoveringBlock(t *testing.T) {
	s := startControlled(t, writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:1", "1MB/s")))
	s.must("block 10.0.0.0/8 --for 1d12h", "10.0.0.0/8")
	s.mustFail("unblock 10.0.0.5", "10.0.0.5/32 is covered by the block of 10.0.0.0/8: unblock that")
	s.mustFail("unblock 11.0.0.5", "11.0.0.5/32 is not blocked")
	s.mustFail("unblock 0.0.0.0/0", "0.0.0.0/0 is not blocked")
	s.must("unblock 10.0.0.0/8", "No prefix is blocked")
}

// TestBlock_NeverEndsSooner checks that a later block never shortens an earlier one.
func TestBlock_NeverEndsSooner(t *testing.T) {
	s := startControlled(t, writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s")))
	s.must("block 192.0.2.1")
	s.must("block 192.0.2.1 --for 100ms")
	s.must("block 192.0.2.2 --for 1h")
	s.must("block 192.0.2.2 --for 100ms")
	s.must("block 192.0.2.3 --for 100ms")
	s.waitLog(`override="block of 192.0.2.3/32"`)
	s.must("blocks", "192.0.2.1/32", "192.0.2.2/32")
	s.must("block 192.0.2.2")
	if out, _ := s.verb("blocks"); strings.Count(out, `"shaperd unblock"`) != 2 {
		t.Errorf("not both are blocked permanently:\n%s", out)
	}
}

// TestBlock_File blocks and unblocks the prefixes of lists: all or, with a mistake in one line, none.
func TestBlock_File(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	s := startControlled(t, config, "--state", filepath.Join(filepath.Dir(config), "state"))
	list := func(text string) string { return writeConfig(t, filepath.Join(t.TempDir(), "list.txt"), text) }
	good := list("# a list\n192.0.2.0/24\n\n2001:db8::7 # one address\n198.51.100.1\r\n198.51.100.1\n")
	s.must("block --file "+good+" --for 1h", "3 of 4 blocked; 3 are blocked in all.")
	s.must("block --file "+good+" --for 1m", "0 of 4 blocked; 3 are blocked in all.")
	s.must("block --file "+good, "3 of 4 blocked; 3 are blocked in all.")
	s.must("blocks", "192.0.2.0/24", "2001:db8::7/128", "198.51.100.1/32")
	s.waitLog(`msg="blocks changed by operator" block="192.0.2.0/24, 2001:db8::7/128, 198.51.100.1/32, 198.51.100.1/32" unblock=none`)
	bad := list("203.0.113.1\n10.0.0.0/33\n")
	s.mustFail("block --file "+bad, bad+`:2:1: "10.0.0.0/33" is not an address`)
	s.mustFail("unblock --file "+bad, bad+":2:1: ")
	s.mustFail("block --file /nowhere/list", "/nowhere/list: no such file")
	s.mustFail("block 192.0.2.1 --file "+good, "takes a prefix or --file, not both")
	s.mustFail("block", "block requires PREFIX")
	s.must("unblock --file "+list("2001:db8::7\n203.0.113.1\n"), "1 of 2 unblocked; 2 are blocked in all.")
	s.must("block --file "+list(""), "0 of 0 blocked; 2 are blocked in all.")
	if out, _ := s.verb("blocks"); strings.Contains(out, "203.0.113.1") || strings.Contains(out, "2001:db8::7") {
		t.Errorf("what was refused or unblocked is blocked:\n%s", out)
	}
	s.must("unblock --file "+good, "2 of 4 unblocked; 0 are blocked in all.")

	e := env{stdin: strings.NewReader("192.0.2.7\n"), stdout: new(strings.Builder), stderr: io.Discard}
	if err := run(t.Context(), e, []string{"block", "--file", "-", "--control", s.socket}); err != nil {
		t.Error(err)
	}
	s.must("blocks", "192.0.2.7/32")
}

// TestBlock_FileLarge blocks as many prefixes as can be, at once.
func TestBlock_FileLarge(t *testing.T) {
	config := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	s := startControlled(t, config, "--state", filepath.Join(filepath.Dir(config), "state"))
	s.must("block 192.0.2.7")
	var many strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&many, "10.%d.%d.%d\n", i>>16, i>>8&255, i&255)
	}
	full := writeConfig(t, filepath.Join(t.TempDir(), "list.txt"), many.String())
	s.mustFail("block --file "+full, "100001 prefixes would be blocked, of at most 100000")
	s.must("unblock 192.0.2.7")
	begin := time.Now()
	s.must("block --file "+full+" --for 1h", "100000 of 100000 blocked; 100000 are blocked in all.")
	t.Logf("blocked in %v", time.Since(begin))
	s.mustFail("block 192.0.2.7", "100001 prefixes would be blocked")
	begin = time.Now()
	s.must("unblock 10.0.0.0")
	t.Logf("one unblocked in %v", time.Since(begin))
	s.must("status", "and 99989 more")
}
