package conn

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// startReplying returns a proxy that refuses all with a reply.
func startReplying(t *testing.T, reply string) *proxyRig {
	return start(t, shaper.TCP, "127.0.0.1:1", shaper.Limit{Name: "cap", Block: true, RefuseWith: shaper.RefuseReply, Reply: reply})
}

// unhex returns the bytes of hexadecimal digits between spaces.
func unhex(s string) string {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return string(b)
}

var (
	pgAskSSL  = unhex("00000008 04d2162f")
	pgAskGSS  = unhex("00000008 04d21630")
	pgHello   = unhex("00000013 00030000") + "user\x00me\x00\x00\x00\x00"
	pgRefusal = pgErrorOf("too many connections, try again in 12 seconds", "HTry again in 12 s.\x00")

	smppBind  = unhex("0000001b 00000009 00000000 01020304") + "me\x00pw\x00\x00\x34\x00\x00\x00"
	modbusGet = unhex("abcd 0000 0006 11 03 0001 0002")
)

func pgErrorOf(message, hint string) string {
	fields := "SFATAL\x00VFATAL\x00C53300\x00M" + message + "\x00" + hint + "\x00"
	return "E\x00\x00\x00" + string(rune(len(fields)+4)) + fields
}

func mysqlErrorOf(number byte, message string) string {
	return string([]byte{byte(9 + len(message)), 0, 0, number, 0xff, 0x10, 0x04}) + "#08004" + message
}

// turns of a conversation, of the client and of the proxy.
type turn struct{ says, hears string }

var conversations = []struct {
	name, reply string
	midway      bool
	turns       []turn
}{
	{"startup", "postgres", false, []turn{{pgHello, pgRefusal}}},
	{"encryption", "postgres", false, []turn{{pgAskGSS, "N"}, {pgAskSSL, "N"}, {pgHello, pgRefusal}}},
	{"encryption three times", "postgres", false, []turn{{pgAskGSS, "N"}, {pgAskSSL, "N"}, {pgAskSSL, "N"}, {pgHello, ""}}},
	{"cancel", "postgres", false, []turn{{unhex("00000010 04d2162e 00000001 00000002"), ""}}},
	{"length that lies", "postgres", false, []turn{{unhex("7fffffff 00030000"), ""}}},
	{"no length", "postgres", false, []turn{{unhex("00000000 00030000"), ""}}},
	{"padded request", "postgres", false, []turn{{unhex("00000009 04d2162f 00"), ""}}},
	{"version 2", "postgres", false, []turn{{unhex("00000010 00020000") + "12345678", ""}}},
	{"TLS", "postgres", false, []turn{{unhex("16030100 f8010000 f40303"), ""}}},
	{"query", "postgres", true, []turn{{"Q\x00\x00\x00\x0dselect 1\x00", pgRefusal}}},
	{"greeting", "mysql", false, []turn{{"", mysqlErrorOf(0, "too many connections, try again in 12 seconds")}}},
	{"login", "mysql", true, []turn{{unhex("20000001 0e"), mysqlErrorOf(2, "too many connections, try again in 12 seconds")}}},
	{"greeting", "smtp", false, []turn{{"", "421 4.7.0 too many connections, try again in 12 seconds\r\n"}}},
	{"command", "redis", false, []turn{{"*1\r\n$4\r\nPING\r\n", "-ERR too many connections, try again in 12 seconds\r\n"}}},
	{"bind", "smpp", false, []turn{{smppBind, unhex("00000010 80000009 00000058 01020304")}}},
	{"submit first", "smpp", false, []turn{{unhex("00000010 00000004 00000000 00000001"), ""}}},
	{"submit", "smpp", true, []turn{{unhex("00000010 00000004 00000000 00000001"), unhex("00000010 80000004 00000058 00000001")}}},
	{"response", "smpp", true, []turn{{unhex("00000010 80000015 00000000 00000001"), ""}}},
	{"length that lies", "smpp", false, []turn{{unhex("ffffffff 00000009 00000000 01020304"), ""}}},
	{"short length", "smpp", false, []turn{{unhex("0000000f 00000009 00000000 01020304"), ""}}},
	{"request", "modbus", false, []turn{{modbusGet, unhex("abcd 0000 0003 11 83 06")}}},
	{"other protocol", "modbus", false, []turn{{unhex("abcd 0001 0006 11 03 0001 0002"), ""}}},
	{"length that lies", "modbus", false, []turn{{unhex("abcd 0000 ffff 11 03 0001 0002"), ""}}},
	{"short length", "modbus", false, []turn{{unhex("abcd 0000 0001 11 03 0001 0002"), ""}}},
	{"exception", "modbus", false, []turn{{unhex("abcd 0000 0006 11 83 0001 0002"), ""}}},
	{"request", "slow down, {limit}: {reason}, {retry_after} s", false, []turn{{"x", "slow down, cap: wait-timeout, 12 s"}}},
}

func newConversation(reply string, midway bool) *conversation {
	return &conversation{replyProtocol: protocolOf(reply), notice: notice{
		reply: reply, limit: "cap", reason: shaper.WaitTimeout.String(), after: 11500 * time.Millisecond, midway: midway,
	}}
}

// hear gives c a piece of what the client says, and returns the answers.
func (c *conversation) hear(piece string) (said string, over bool) {
	for {
		send, goesOn, over := c.next()
		said += string(send)
		switch {
		case over:
			return said, true
		case goesOn:
		case piece == "":
			return said, false
		default:
			n := copy(c.input[c.received:], piece)
			c.received, piece = c.received+n, piece[n:]
		}
	}
}

// What is said does not depend on the pieces in which the client's bytes arrive.
func TestReply_Conversations(t *testing.T) {
	for _, tt := range conversations {
		for _, most := range []int{1, 3, 7, 1000} {
			t.Run(fmt.Sprintf("%s %s in pieces of %d", tt.reply, tt.name, most), func(t *testing.T) {
				c := newConversation(tt.reply, tt.midway)
				over := false
				for _, turn := range tt.turns {
					heard := ""
					if turn.says == "" {
						heard, over = c.hear("")
					}
					for piece := range slices.Chunk([]byte(turn.says), most) {
						if over {
							break
						}
						var said string
						said, over = c.hear(string(piece))
						heard += said
					}
					if diff := cmp.Diff(turn.hears, heard); diff != "" {
						t.Errorf("-want +got:\n%s", diff)
					}
				}
				if !over {
					t.Error("the conversation is not over")
				}
			})
		}
	}
}

// The same through sockets, byte by byte.
func TestReply_ByteByByte(t *testing.T) {
	for _, tt := range conversations {
		if tt.midway {
			continue
		}
		t.Run(tt.reply+" "+tt.name, func(t *testing.T) {
			t.Parallel()
			at := startReplying(t, tt.reply).addr()
			begun := time.Now()
			// late reports whether the client was silent for as long as the proxy waits for what it says, or may have been.
			late := func() bool { return time.Since(begun) >= lingerTimeout.Duration()*9/10 }
			c := dial(t, at)
			c.SetNoDelay(true)
			for i, turn := range tt.turns {
				for _, b := range []byte(turn.says) {
					if _, err := c.Write([]byte{b}); err != nil && !late() {
						t.Fatal(err)
					}
					time.Sleep(time.Millisecond)
				}
				want := turn.hears
				if want == pgRefusal {
					want = pgErrorOf("connections are blocked", "")
				} else if tt.reply == "mysql" {
					want = mysqlErrorOf(0, "connections are blocked")
				}
				want = strings.NewReplacer("too many connections, try again in 12 seconds", "connections are blocked", "wait-timeout, 12", "blocked, 60").Replace(want)
				if i == len(tt.turns)-1 {
					// The end follows the last answer, however late it is.
					got := make([]byte, len(want))
					n, err := io.ReadFull(c, got)
					judge := !late()
					rest, end := io.ReadAll(c)
					if got = append(got[:n], rest...); judge && (string(got) != want || err != nil || end != nil) {
						t.Errorf("got %q, %v, %v, want %q", got, err, end, want)
					}
					return
				}
				got := make([]byte, len(want))
				if _, err := io.ReadFull(c, got); !late() && (err != nil || string(got) != want) {
					t.Fatalf("got %q, %v, want %q", got, err, want)
				}
			}
		})
	}
}

// A client that says nothing, or half of something, is answered if it speaks second, or if the answer does not depend on
// what it says. In any case it does not stay.
func TestReply_Silence(t *testing.T) {
	for _, tt := range []struct {
		reply, says string
		atOnce      bool
		want        string
	}{
		{"mysql", "", true, "connections are blocked"},
		{"smtp", "", true, "421 4.7.0 connections are blocked"},
		{"redis", "", false, "-ERR"},
		{"http-429", "", false, "HTTP/1.1 429"},
		{"a text", "", false, "a text"},
		{"postgres", "", false, "^$"},
		{"postgres", pgAskSSL, true, "^N$"},
		{"postgres", pgHello[:7], false, "^$"},
		{"smpp", "", false, "^$"},
		{"smpp", smppBind[:15], false, "^$"},
		{"modbus", "", false, "^$"},
		{"modbus", modbusGet[:7], false, "^$"},
	} {
		t.Run(fmt.Sprintf("%s %d bytes", tt.reply, len(tt.says)), func(t *testing.T) {
			t.Parallel()
			r := startReplying(t, tt.reply)
			atOnce := false
			for range 5 { // a busy machine may delay an answer that comes at once
				began := time.Now()
				c := dial(t, r.addr())
				c.Write([]byte(tt.says))
				c.SetReadDeadline(began.Add(700 * time.Millisecond))
				got, err := io.ReadAll(c)
				quick := time.Since(began) < lingerTimeout.Duration()*9/10 // or what was read may be late
				early := quick && len(got) > 0
				if !tt.atOnce && quick && (early || !errors.Is(err, os.ErrDeadlineExceeded)) {
					t.Errorf("heard %q, %v, at once", got, err)
				}
				c.SetReadDeadline(time.Now().Add(testTimeout))
				rest, err := io.ReadAll(c)
				if got = append(got, rest...); !regexp.MustCompile(tt.want).Match(got) || err != nil {
					t.Errorf("heard %q, %v, want %q", got, err, tt.want)
				}
				r.settle() // even though the client keeps the connection open
				if took := time.Since(began); took > testTimeout*3/4 {
					t.Errorf("the connection has stayed for %v", took)
				}
				if atOnce = atOnce || early; atOnce == tt.atOnce {
					break
				}
			}
			if atOnce != tt.atOnce {
				t.Error("no answer at once")
			}
		})
	}
}

// Bytes that trickle in do not prolong a conversation, and answers do only a few times.
func TestReply_Trickle(t *testing.T) {
	for _, tt := range []struct{ reply, piece string }{
		{"postgres", "\x00"}, {"postgres", pgAskSSL}, {"smpp", "\x00"}, {"modbus", "\x00"}, {"http-429", "G"}, {"smtp", "H"},
	} {
		t.Run(fmt.Sprintf("%s %d bytes", tt.reply, len(tt.piece)), func(t *testing.T) {
			t.Parallel()
			r := startReplying(t, tt.reply)
			c := dial(t, r.addr())
			began := time.Now()
			testutil.WaitFor(t, "the connection to be accepted", func() bool { return r.shaper.Listener("l").Accepted.Load() > 0 })
			for r.proxy.openConns.Load() > 0 {
				c.Write([]byte(tt.piece))
				time.Sleep(300 * time.Millisecond)
				if took := time.Since(began); took > testTimeout {
					t.Fatalf("the connection has stayed for %v", took)
				}
			}
		})
	}
}

// A client that never stops, and does not read, does not stay either.
func TestReply_Endless(t *testing.T) {
	for _, reply := range append(shaper.ReplyNames(), "a text") {
		for name, piece := range map[string]string{
			"zeros": strings.Repeat("\x00", 1<<10), "ones": strings.Repeat("\xff", 1<<10), "SSL": strings.Repeat(pgAskSSL, 128),
			"binds": strings.Repeat(smppBind, 40), "requests": strings.Repeat(modbusGet, 80),
		} {
			t.Run(reply+" "+name, func(t *testing.T) {
				t.Parallel()
				r := startReplying(t, reply)
				c := dial(t, r.addr())
				began := time.Now()
				c.SetDeadline(began.Add(testTimeout))
				for sent := 0; ; {
					n, err := c.Write([]byte(piece))
					if sent += n; err != nil {
						if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
							t.Error(err)
						}
						break
					}
					if sent > 64<<20 {
						t.Fatal("it takes everything")
					}
				}
				r.settle()
				if took := time.Since(began); took > testTimeout*3/4 {
					t.Errorf("the connection has stayed for %v", took)
				}
			})
		}
	}
}

// What a downstream that fails has been sent is answered: the client will not say it again.
func TestReply_ToRetried(t *testing.T) {
	v := newMoodyServer(t, "resets")
	r := startBreaker(t, v.addr, shaper.Breaker{After: 1, Of: allFailures, For: time.Minute, Probe: 1, Timeout: time.Second, Reply: "postgres"})
	r.listen.RetryUnanswered = true
	r.apply()
	c := dial(t, r.addr())
	c.Write([]byte(pgHello + "\n")) // at which the server resets it
	got, err := io.ReadAll(c)
	if !bytes.Contains(got, []byte("Mserver is unavailable, try again in ")) || err != nil {
		t.Errorf("heard %q, %v", got, err)
	}
}

// After a PROXY header, what follows it is looked at.
func TestReply_AfterProxyHeader(t *testing.T) {
	r := startReplying(t, "modbus")
	r.listen.AcceptProxyFrom = anySource
	r.apply(shaper.Limit{Name: "cap", Block: true, RefuseWith: shaper.RefuseReply, Reply: "modbus"})
	c := dial(t, r.addr())
	c.Write([]byte("PROXY TCP4 10.9.8.7 10.0.0.1 1000 502\r\n" + modbusGet))
	if got, err := io.ReadAll(c); string(got) != unhex("abcd 0000 0003 11 83 06") || err != nil {
		t.Errorf("heard %x, %v", got, err)
	}
}

// A question is answered in the midst of a connection.
func TestReply_MidTurn(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, slowAnswers(t))
	limit := turnLimit(1, time.Millisecond)
	limit.QueueTimeout, limit.RefuseWith, limit.Reply = 200*time.Millisecond, shaper.RefuseReply, "mysql"
	r.apply(limit)
	c, holder := dial(t, r.addr()), dial(t, r.addr())
	c.Write([]byte("q"))
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, "the slot to be free", func() bool { return r.inTurn() == 0 })
	holder.Write([]byte("n"))
	testutil.WaitFor(t, "the slot to be taken", func() bool { return r.inTurn() == 1 })
	c.Write([]byte("\x01\x00\x00\x05\x0e"))
	got, err := io.ReadAll(c)
	if len(got) < 4 || !strings.HasPrefix(string(got[3:]), "\x06\xff\x10\x04#08004too many connections, try again in ") || err != nil {
		t.Errorf("heard %q, %v", got, err)
	}
}

func TestReply_NamesHaveProtocols(t *testing.T) {
	names := shaper.ReplyNames()
	for _, name := range names {
		if replyProtocols[name] == nil {
			t.Errorf("%s has no protocol", name)
		}
	}
	if len(names) != len(replyProtocols) {
		t.Errorf("%d names, %d protocols", len(names), len(replyProtocols))
	}
}

// FuzzReply says random things to all protocols, in random pieces. What is said back must not depend on the pieces, must be
// bounded, and must be what the protocol says of such a question, if it is one.
func FuzzReply(f *testing.F) {
	for _, tt := range conversations {
		all := ""
		for _, turn := range tt.turns {
			all += turn.says
		}
		f.Add(all, uint8(1), tt.midway)
		f.Add(all, uint8(5), tt.midway)
	}
	f.Fuzz(func(t *testing.T, says string, most uint8, midway bool) {
		for _, reply := range shaper.ReplyNames() {
			whole, wholeOver := newConversation(reply, midway).hear(says)
			c := newConversation(reply, midway)
			said, over := c.hear("")
			for piece := range slices.Chunk([]byte(says), max(1, int(most))) {
				if over {
					break
				}
				more, nowOver := c.hear(string(piece))
				said, over = said+more, nowOver
			}
			if said != whole || over != wholeOver {
				t.Fatalf("%s: %q in pieces of %d is answered with %q, over %v; otherwise with %q, %v", reply, says, most, said, over, whole, wholeOver)
			}
			if len(said) > 512 {
				t.Fatalf("%s: %d bytes", reply, len(said))
			}
			if want, ok := askedFor(reply, says, midway); ok && said != want {
				t.Fatalf("%s: %q is answered with %q, want %q", reply, says, said, want)
			}
		}
	})
}

// askedFor is what the conversation of a protocol with one question has as its answer, by another reading of its rules.
func askedFor(reply, says string, midway bool) (want string, ok bool) {
	r := strings.NewReader(says)
	switch reply {
	case "modbus":
		var q struct {
			Transaction, Protocol, Length uint16
			Unit, Function                byte
		}
		if binary.Read(r, binary.BigEndian, &q) != nil {
			return "", true
		}
		if q.Protocol != 0 || q.Length < 2 || q.Length > 254 || q.Function < 1 || q.Function > 127 {
			return "", true
		}
		q.Length, q.Function = 3, q.Function+128
		var b bytes.Buffer
		_ = binary.Write(&b, binary.BigEndian, q)
		return b.String() + "\x06", true
	case "smpp":
		var q struct{ Length, Command, Status, Sequence uint32 }
		if binary.Read(r, binary.BigEndian, &q) != nil {
			return "", true
		}
		binds := q.Command == 1 || q.Command == 2 || q.Command == 9
		if q.Length < 16 || q.Length > 1<<16 || q.Command >= 1<<31 || !binds && !midway {
			return "", true
		}
		q.Length, q.Command, q.Status = 16, q.Command+1<<31, 0x58
		var b bytes.Buffer
		_ = binary.Write(&b, binary.BigEndian, q)
		return b.String(), true
	case "postgres":
		if midway {
			return pgRefusal, true
		}
		for range 3 {
			var q struct{ Length, Code int32 }
			if binary.Read(r, binary.BigEndian, &q) != nil {
				return want, true
			}
			switch {
			case q == struct{ Length, Code int32 }{8, 1234<<16 | 5679}, q == struct{ Length, Code int32 }{8, 1234<<16 | 5680}:
				want += "N"
			case q.Length >= 8 && q.Length <= 10000 && q.Code>>16 == 3:
				return want + pgRefusal, true
			default:
				return want, true
			}
		}
		return want, true
	}
	return "", false
}

// The text of a configuration allocates no more than its own length, and no reply what a client claims.
func TestReply_AllocatesLittle(t *testing.T) {
	for _, tt := range conversations {
		all := ""
		for _, turn := range tt.turns {
			all += turn.says
		}
		if n := testing.AllocsPerRun(100, func() { newConversation(tt.reply, tt.midway).hear(all) }); n > 30 {
			t.Errorf("%s %s: %v allocations", tt.reply, tt.name, n)
		}
	}
}
