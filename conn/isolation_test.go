package conn

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// A listener goes on while the loop of another one is stuck.
func TestLoopsAreApart(t *testing.T) {
	r := newLoopsRig(t, 2, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	r.apply([]string{"a", "b"}, shaper.Limit{Name: "x", Match: at("a"), Rate: 80e6, MaxConnections: 100})
	a, b := dial(t, r.addr("a")), dial(t, r.addr("b"))
	echo := func(c *net.TCPConn) error {
		if _, err := c.Write([]byte("ping")); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 4))
		return err
	}
	for _, c := range []*net.TCPConn{a, b} {
		if err := echo(c); err != nil {
			t.Fatal(err)
		}
	}
	stuck, goOn := make(chan struct{}), make(chan struct{})
	r.proxy.listeners["b"].proxy.loop.post(func(leaky.Time) { close(stuck); <-goOn })
	<-stuck
	for range 50 {
		if err := echo(a); err != nil {
			t.Fatal(err)
		}
		c := dial(t, r.addr("a"))
		if err := echo(c); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	b.Write([]byte("ping"))
	b.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := b.Read(make([]byte, 4)); err == nil {
		t.Error("the loop of b was not stuck")
	}
	close(goOn)
	b.SetReadDeadline(time.Now().Add(testTimeout))
	if _, err := io.ReadFull(b, make([]byte, 4)); err != nil {
		t.Error(err)
	}
}

// floodVariable makes the test binary a source of traffic, see flood.
const floodVariable = "SHAPERD_TEST_FLOOD"

// flood sends datagrams or opens connections from an address, so many a second, until its input ends, and prints how many. It is
// in a process of its own, so that it shares nothing with the loops.
func flood(kind string, from netip.Addr, to string, rate int) {
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	send := func() int {
		c, err := (&net.Dialer{Timeout: time.Second, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}).Dial("tcp4", to)
		if err == nil { // it may have been refused
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
		return 1
	}
	if kind == "udp" {
		send = datagrams(from, to, min(64, max(1, rate/10_000)))
	}
	n := 0
	begun := time.Now()
	for {
		select {
		case <-ended:
			fmt.Println(n)
			return
		default:
		}
		if n < int(time.Since(begun).Seconds()*float64(rate)) {
			n += send()
		} else {
			time.Sleep(200 * time.Microsecond)
		}
	}
}

// datagrams returns a function that sends n datagrams in one system call, so that they cost the host little more than their way.
func datagrams(from netip.Addr, to string, n int) func() int {
	c, err := (&net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}).Dial("udp4", to)
	if err != nil {
		panic(err)
	}
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		panic(err)
	}
	data := make([]byte, isolationSize)
	type message struct { // struct mmsghdr
		unix.Msghdr
		sent uint32
	}
	iov := unix.Iovec{Base: &data[0], Len: uint64(len(data))}
	all := make([]message, n)
	for i := range all {
		all[i].Iov, all[i].Iovlen = &iov, 1
	}
	return func() int {
		_ = raw.Control(func(fd uintptr) {
			_, _, _ = unix.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&all[0])), uintptr(n), 0, 0, 0)
		})
		return n
	}
}

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// startFlood starts flood. The result ends it, and returns how many it has sent, and the CPU time that this took.
func startFlood(b *testing.B, kind string, from netip.Addr, to string, rate int) (end func() (int, time.Duration)) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), floodVariable+"="+fmt.Sprint(kind, " ", from, " ", to, " ", rate))
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	return func() (int, time.Duration) {
		in.Close()
		line, _ := bufio.NewReader(out).ReadString('\n')
		_ = cmd.Wait()
		n, _ := strconv.Atoi(line[:max(len(line)-1, 0)])
		return n, cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
}

const (
	isolationRate = 10 << 20 // bytes/s
	isolationSize = 1400     // bytes
	isolationTime = 500 * time.Millisecond

	isolationPhases = 8 // with a flood, and as many without
)

// BenchmarkIsolation measures how evenly datagrams leave listener a, at 10 MiB/s, while listener b refuses a flood: the spread of the
// gaps between them, from the 1st to the 99th percentile, and sigma, the smallest burst for which they conform to the rate. The
// ratios are to what a has without the flood, in the same run, by medians. With fewer cores than busy threads, that of the flood and of both
// loops among them, they are those of the host's scheduler. The kernel takes the times at which they arrive.
func BenchmarkIsolation(b *testing.B) {
	for _, loops := range []int{1, 2} {
		for _, f := range []struct {
			name, kind string
			rate       int
		}{{"datagrams", "udp", 200_000}, {"connections", "tcp", 10_000}} {
			b.Run(fmt.Sprintf("loops=%d/%s", loops, f.name), func(b *testing.B) {
				for b.Loop() {
					measureIsolation(b, loops, f.kind, f.rate)
				}
			})
		}
	}
}

// newLoopsBench returns a rig of listeners for UDP that logs nothing. The caller closes its proxy.
func newLoopsBench(b *testing.B, loops int, downstream netip.AddrPort) *loopsRig {
	s := shaper.New(1000)
	p, err := New(Options{Shaper: s, Clock: pacer.NewClock(), Log: quietLog, TrafficLog: quietLog, Loops: loops})
	if err != nil {
		b.Fatal(err)
	}
	return &loopsRig{
		t: b, proxy: p, shaper: s, protocol: shaper.UDP, ports: map[string]netip.AddrPort{},
		downstream: shaper.Downstream{Host: downstream.Addr().String(), Port: downstream.Port()},
	}
}

func measureIsolation(b *testing.B, loops int, kind string, rate int) {
	server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		b.Fatal(err)
	}
	defer server.Close()
	_ = server.SetReadBuffer(4 << 20)
	r := newLoopsBench(b, loops, server.LocalAddr().(*net.UDPAddr).AddrPort())
	s, p := r.shaper, r.proxy
	defer p.Close()
	a := r.listener("a")
	r.protocol = map[string]shaper.Protocol{"udp": shaper.UDP, "tcp": shaper.TCP}[kind]
	all := []shaper.Listener{a, r.listener("b")}
	policy, err := s.CompileRules(shaper.Rules{Listeners: all, Limits: []shaper.Limit{
		{Name: "paced", Match: at("a"), Rate: 8 * isolationRate, MaxDelay: 50 * time.Millisecond},
		{Name: "refused", Match: at("b"), Block: true},
	}})
	if err != nil {
		b.Fatal(err)
	}
	if err := p.Apply(b.Context(), all, policy, nil); err != nil {
		b.Fatal(err)
	}
	endSource := startFlood(b, "udp", loopback, r.addr("a"), isolationRate/isolationSize*5/4)
	defer endSource()
	arrivals := make([]int64, 0, 1<<16)
	measure := func() (spread, sigma float64) {
		arrivals = receiveTimes(b, server, arrivals[:0], time.Now().Add(isolationTime))
		return evenness(arrivals)
	}
	_, _ = measure() // it has begun by then
	var alone, flooded, aloneSigma, floodedSigma []float64
	refused := 0
	for range isolationPhases { // by turns, since other work on the host comes and goes
		spread, sigma := measure()
		alone, aloneSigma = append(alone, spread), append(aloneSigma, sigma)
		endFlood := startFlood(b, kind, loopback, r.addr("b"), rate)
		spread, sigma = measure()
		flooded, floodedSigma = append(flooded, spread), append(floodedSigma, sigma)
		sent, _ := endFlood()
		refused += sent
	}
	b.ReportMetric(float64(refused)/isolationPhases/isolationTime.Seconds(), "refused/s")
	b.ReportMetric(median(alone), "us-gaps-alone")
	b.ReportMetric(median(flooded)/median(alone), "x-gaps")
	b.ReportMetric(median(aloneSigma), "B-sigma-alone")
	b.ReportMetric(median(floodedSigma)/median(aloneSigma), "x-sigma")
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// receiveTimes returns when datagrams arrive until end, in ns.
func receiveTimes(b *testing.B, c *net.UDPConn, arrivals []int64, end time.Time) []int64 {
	raw, err := c.SyscallConn()
	if err != nil {
		b.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1) })
	if err != nil {
		b.Fatal(err)
	}
	data, oob := make([]byte, 1500), make([]byte, 64)
	_ = c.SetReadDeadline(end)
	for {
		_, n, _, _, err := c.ReadMsgUDPAddrPort(data, oob)
		if err != nil {
			return arrivals
		}
		messages, _ := unix.ParseSocketControlMessage(oob[:n])
		for _, m := range messages {
			if m.Header.Type == unix.SO_TIMESTAMPNS && len(m.Data) >= int(unsafe.Sizeof(unix.Timespec{})) {
				arrivals = append(arrivals, (*unix.Timespec)(unsafe.Pointer(&m.Data[0])).Nano())
			}
		}
	}
}

// evenness returns the spread of the gaps between arrivals, in us, and their sigma, in bytes.
func evenness(arrivals []int64) (spread, burst float64) {
	if len(arrivals) < 100 {
		return 0, 0
	}
	s := sigma{rate: float64(isolationRate) / 1e9}
	var gaps []int64
	for i, at := range arrivals {
		s.add(leaky.Time(at-arrivals[0]), isolationSize)
		if i > 0 {
			gaps = append(gaps, at-arrivals[i-1])
		}
	}
	slices.Sort(gaps)
	return float64(gaps[len(gaps)*99/100]-gaps[len(gaps)/100]) / 1000, s.max
}
