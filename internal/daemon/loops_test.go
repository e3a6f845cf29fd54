package daemon

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// Listeners that share nothing are on loops of their own. A reload that joins them leaves their connections alone.
func TestLoops(t *testing.T) {
	at := testutil.FreeAddr(t, "tcp")
	echo := fmt.Sprintf("[[listen]]\nname = \"echo\"\naddress = [\"tcp://%s\"]\ndownstream = [%q]\n", at, testutil.ServeTCP(t, testutil.Echo))
	d := startDaemon(t, echo, Options{})
	loops := func() string {
		t.Helper()
		s, err := d.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		text := ""
		for _, l := range s.Listeners {
			text += fmt.Sprint(l.Name, " ", l.Loop, " ")
		}
		return text
	}
	if got, want := loops(), "db 1 echo 2 "; got != want {
		t.Errorf("loops %q, want %q", got, want)
	}
	c, err := net.Dial("tcp4", at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ping := func() {
		t.Helper()
		if _, err := c.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
	}
	ping()
	reload := func(more string) {
		t.Helper()
		d.write(t, more)
		d.reload <- syscall.SIGHUP
	}
	reload(echo + "[[limit]]\nname = \"total\"\nrate = \"100MB/s\"\n")
	d.log.WaitFor(t, "loops=1")
	testutil.WaitFor(t, "one loop", func() bool { return loops() == "db 1 echo 1 " })
	ping()
	text, err := os.ReadFile(d.config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.config, []byte(strings.Replace(string(text), "loops = 2", "loops = 3", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	d.reload <- syscall.SIGHUP
	d.log.WaitFor(t, "[daemon] loops: changed from 2 to 3, which requires a restart")
	ping()
}
