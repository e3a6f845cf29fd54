package page

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

var (
	serve    = flag.Bool("serve", false, "serve the scenarios until interrupted")
	pictures = flag.String("pictures", "", "`directory` for screenshots of the scenarios")
)

// serveScenario serves a scenario and returns its URL.
func serveScenario(t *testing.T, scenario string, every time.Duration) string {
	t.Helper()
	f := &fake{scenario: scenario, every: every, started: time.Now().Add(-3*time.Hour - time.Minute)}
	s := httptest.NewServer(f.handler())
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s.URL
}

func TestServe(t *testing.T) {
	if !*serve {
		t.Skip("requires -serve")
	}
	for _, s := range scenarios {
		t.Log(s, serveScenario(t, s, time.Second))
	}
	select {}
}

func TestPage(t *testing.T) {
	urls := make(map[string]string)
	for _, s := range scenarios {
		urls[s] = serveScenario(t, s, 150*time.Millisecond)
	}
	d := startDaemon(t)
	urls["daemon"] = d.URL
	runChecks(t, map[string]any{"urls": urls, "daemon": d, "nasty": nasty, "pictures": *pictures})
}

// runChecks runs page.mjs with args, and reports its checks as subtests.
func runChecks(t *testing.T, args any) {
	t.Helper()
	modules, err := filepath.Abs("../../build/page")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("./fetch.sh", modules).CombinedOutput(); err != nil {
		t.Fatalf("fetch.sh: %v\n%s", err, out)
	}
	input, err := json.Marshal(args)
	if err != nil {
		t.Fatal(err)
	}

	ctx := t.Context()
	if end, bounded := t.Deadline(); bounded { // each check waits at most 20 s; together they take a minute on a busy host
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, end.Add(-20*time.Second))
		defer cancel()
	}
	cmd := exec.CommandContext(ctx, "node", "page.mjs", modules)
	cmd.Stdin = bytes.NewReader(input)
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	n := 0
	for lines := bufio.NewScanner(out); lines.Scan(); n++ {
		var check struct{ Name, Error string }
		if err := json.Unmarshal(lines.Bytes(), &check); err != nil {
			t.Errorf("page.mjs wrote %q: %v", lines.Text(), err)
			continue
		}
		t.Run(check.Name, func(t *testing.T) {
			if check.Error != "" {
				t.Error(check.Error)
			}
		})
	}
	if err := errors.Join(cmd.Wait(), ctx.Err()); err != nil {
		t.Errorf("page.mjs: %v", err)
	}
	if n == 0 {
		t.Error("page.mjs ran no checks")
	}
}
