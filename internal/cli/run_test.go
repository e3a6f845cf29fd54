package cli

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestRun_ClosedStderr checks that a daemon survives when the reader of its log goes away.
func TestRun_ClosedStderr(t *testing.T) {
	metrics := testutil.FreeAddr(t, "tcp")
	path := writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), metrics, "127.0.0.1:9", "1MB/s"))
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := exec.Command(os.Args[0], "run", "--config", path)
	cmd.Env = append(os.Environ(), asShaperd+"=1")
	cmd.Stderr = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() { cmd.Process.Kill(); <-ended }()

	buf := make([]byte, 64<<10)
	for got := ""; !strings.Contains(got, "msg=ready"); {
		n, err := r.Read(buf)
		if err != nil {
			t.Fatalf("%v:\n%s", err, got)
		}
		got += string(buf[:n])
	}
	r.Close()
	defer http.DefaultClient.CloseIdleConnections()
	for i := 2; i < 4; i++ { // each is logged
		if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("shaperd_config_reloads_total{result=\"success\"} %d\n", i)
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			answer, err := http.Get("http://" + metrics + "/metrics")
			if err != nil {
				t.Fatalf("the daemon has ended: %v", err)
			}
			got, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			if strings.Contains(string(got), want) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("no %q in 5 s", want)
			}
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	err = <-ended
	ended <- err
	if err != nil {
		t.Errorf("the daemon ended with: %v", err)
	}
}
