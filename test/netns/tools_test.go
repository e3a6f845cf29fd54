package netns

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"
)

const iperfPort = 5201

// iperf3 runs an iperf3 server at the downstream and a client that connects to the
// address to, and decodes the client's report.
func iperf3(t *testing.T, n *network, f family, to netip.Addr, report any, args ...string) {
	t.Helper()
	at := netip.AddrPortFrom(to, iperfPort)
	n.downstream.iperf3Server(t, at.Port())
	if err := n.client.iperf3Client(f.sources[0], at, report, args...); err != nil {
		t.Fatal(err)
	}
}

// iperf3Path returns the path of the tool.
func iperf3Path() (string, error) {
	tool, err := exec.LookPath("iperf3")
	if err != nil {
		err = fmt.Errorf("%w: \"make test\" installs it, and so does \"apt-get install iperf3\"", err)
	}
	return tool, err
}

// iperf3Server starts a server inside the host, for one client.
func (h *host) iperf3Server(t *testing.T, port uint16) {
	t.Helper()
	tool, err := iperf3Path()
	if err != nil {
		t.Fatal(err)
	}
	server := exec.Command(tool, "--server", "--one-off", "--forceflush", "--port", fmt.Sprint(port))
	out, in := io.Pipe()
	server.Stdout, server.Stderr = in, in
	if err := h.Start(server); err != nil {
		t.Fatalf("start iperf3: %v", err)
	}
	listens, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		var output bytes.Buffer
		buf := make([]byte, 1<<10)
		for waiting := true; ; {
			n, err := out.Read(buf)
			output.Write(buf[:n])
			if waiting && strings.Contains(output.String(), "listening") {
				close(listens)
				waiting = false
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = server.Process.Kill() // it may wait for a client that never came
		_ = server.Wait()
		in.Close()
		<-ended
	})
	select {
	case <-listens:
	case <-time.After(30 * time.Second):
		t.Fatal("the iperf3 server does not listen")
	}
}

// iperf3Client runs a client inside the host, and decodes its report.
func (h *host) iperf3Client(from netip.Addr, to netip.AddrPort, report any, args ...string) error {
	tool, err := iperf3Path()
	if err != nil {
		return err
	}
	var stdout, stderr bytes.Buffer
	client := exec.Command(tool, append([]string{
		"--client", to.Addr().String(), "--bind", from.String(), "--port", fmt.Sprint(to.Port()), "--json", "--connect-timeout", "3000",
	}, args...)...)
	client.Stdout, client.Stderr = &stdout, &stderr
	if err := h.Start(client); err != nil {
		return fmt.Errorf("start iperf3: %w", err)
	}
	late := time.AfterFunc(20*time.Second, func() { _ = client.Process.Kill() })
	defer late.Stop()
	if err := client.Wait(); err != nil {
		return fmt.Errorf("iperf3: %w\n%s%s", err, stdout.Bytes(), stderr.Bytes())
	}
	if err := json.Unmarshal(stdout.Bytes(), report); err != nil {
		return fmt.Errorf("read the report of iperf3: %w\n%s", err, stdout.Bytes())
	}
	return nil
}

// iperfConfig is like config, with iperf3's port.
func iperfConfig(f family, limits ...string) string {
	text := config(f, limits...)
	tcp, udp := netip.AddrPortFrom(f.any, tcpPort), netip.AddrPortFrom(f.any, 8000)
	at := netip.AddrPortFrom(f.any, iperfPort)
	return strings.NewReplacer(fmt.Sprint("tcp://", tcp), fmt.Sprint("tcp://", at),
		fmt.Sprint("udp://", udp, "-8010"), fmt.Sprint("udp://", at)).Replace(text)
}

// TestIperf3 measures the limits with an independent tool.
func TestIperf3(t *testing.T) {
	for _, f := range families {
		t.Run(f.name+"/tcp", func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) { return iperf3TCP(t, f) })
		})
		t.Run(f.name+"/udp", func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) { return iperf3UDP(t, f) })
		})
	}
}

const iperfTime = 2 * time.Second

func iperf3TCP(t *testing.T, f family) (stallReport, error) {
	n := newNetwork(t)
	d := n.shaper.shaperd(t, iperfConfig(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
	var report struct {
		End struct {
			SumReceived struct {
				Rate float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	stalls := startStallWatch(t)
	iperf3(t, n, f, f.proxy, &report, "--time", fmt.Sprint(iperfTime.Seconds()), "--parallel", "2")
	stalled := stalls.stop()
	mustHaveLimited(t, d, "smooth")
	got, want := report.End.SumReceived.Rate, 8*tenMiB.rate
	if got < (0.93-stalled.share(iperfTime))*want || got > 1.05*want {
		return stalled, fmt.Errorf("iperf3 measured %.2f Mbit/s, want %.2f; %v", got/1e6, want/1e6, stalled)
	}
	return stalled, nil
}

func iperf3UDP(t *testing.T, f family) (stallReport, error) {
	n := newNetwork(t)
	d := n.shaper.shaperd(t, iperfConfig(f, limit("sms", onUDP, keySource, `packets = "1000pps"`, `max_delay = "50ms"`)))
	var report struct {
		End struct {
			Sum struct {
				Packets int     `json:"packets"`
				Lost    float64 `json:"lost_percent"`
			}
		}
	}
	stalls := startStallWatch(t)
	iperf3(t, n, f, f.proxy, &report, "--udp", "--time", fmt.Sprint(iperfTime.Seconds()), "--length", "512", "--bitrate", "8192000") // 2,000 a second
	stalled := stalls.stop()
	mustHaveLimited(t, d, "sms")
	if sum := report.End.Sum; sum.Packets < 3000 || sum.Lost < 40 || sum.Lost > 60+100*stalled.share(iperfTime) {
		return stalled, fmt.Errorf("iperf3 measured %.1f %% of %d datagrams lost, want half of 4000; %v", sum.Lost, sum.Packets, stalled)
	}
	return stalled, nil
}
