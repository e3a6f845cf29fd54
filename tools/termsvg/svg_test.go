package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A screenText is the text of a frame, a string for each row that has any.
type screenText []string

// parsedSVG is what a browser would show of a picture.
type parsedSVG struct {
	frames []screenText
	rows   map[string]string // text by id
}

// parseSVG fails if the picture is not well-formed, or has an element or attribute that an image
// should not have.
func parseSVG(t *testing.T, text string) parsedSVG {
	t.Helper()
	p := parsedSVG{rows: map[string]string{}}
	dec := xml.NewDecoder(strings.NewReader(text))
	inText, film, id := false, false, ""
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return p
		}
		if err != nil {
			t.Fatalf("the picture is not well-formed: %v\n%s", err, text)
		}
		switch e := token.(type) {
		case xml.StartElement:
			attributes := map[string]string{}
			for _, a := range e.Attr {
				attributes[a.Name.Local] = a.Value
				if strings.HasPrefix(strings.ToLower(a.Name.Local), "on") || a.Name.Local == "href" && !strings.HasPrefix(a.Value, "#") {
					t.Errorf("<%s> has the attribute %s=%q", e.Name.Local, a.Name.Local, a.Value)
				}
			}
			switch e.Name.Local {
			case "g":
				switch {
				case attributes["class"] == "film":
					film = true
				case film:
					p.frames = append(p.frames, nil)
					if want := fmt.Sprintf("translate(0 %d)", (len(p.frames)-1)*filmStep(t, text)); attributes["transform"] != want {
						t.Errorf("frame %d is at %q, want %q", len(p.frames), attributes["transform"], want)
					}
				default:
					id = attributes["id"]
				}
			case "use":
				row, known := p.rows[strings.TrimPrefix(attributes["href"], "#")]
				if !known {
					t.Errorf("a frame uses %q, which is not defined", attributes["href"])
				}
				last := len(p.frames) - 1
				p.frames[last] = append(p.frames[last], row)
			case "text":
				inText = true
			case "svg", "style", "defs", "rect", "path":
			default:
				t.Errorf("the picture has an element <%s>", e.Name.Local)
			}
		case xml.EndElement:
			inText = inText && e.Name.Local != "text"
			if e.Name.Local == "defs" {
				id = ""
			}
		case xml.CharData:
			if inText && id != "" {
				p.rows[id] = strings.TrimPrefix(p.rows[id]+"|"+string(e), "|")
			}
		}
	}
}

var keyframe = regexp.MustCompile(`(?m)^([\d.]+)% \{ transform: translateY\((-?[\d.]+)px\); \}$`)

// filmStep returns the height of the window, which is the distance of two frames.
func filmStep(t *testing.T, text string) int {
	t.Helper()
	m := regexp.MustCompile(`<svg x="\d+" y="\d+" width="[\d.]+" height="(\d+)" overflow="hidden">`).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("the picture has no window\n%s", text)
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

func render(t *testing.T, r *recording, o options) string {
	t.Helper()
	frames, err := r.frames(o.step)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := writeSVG(&b, r, frames, o); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestRender(t *testing.T) {
	at := func(ms int, text string) output { return output{time.Duration(ms) * time.Millisecond, text} }
	r := &recording{20, 4, []output{
		at(50, "\x1b[?1049h\x1b[H"),                                        // a blank screen
		at(1000, "\x1b[1mone\x1b[0m <&>\r\n"),                              // 0 s
		at(1010, "\x1b[31mred\x1b[0m   ▁▂ far"),                            //
		at(1500, "\x1b[2;1H\x1b[2K\x1b[7m> two \x1b[0m"),                   // 0.5 s
		at(1700, "\x1b[2;1H\x1b[7m> two \x1b[0m"),                          // the same again
		at(3000, "\x1b[1;1H\x1b[2Kthree\x1b[3;1Hx\x1b[1A\x1b[1G\x1b[2Kup"), // 2 s
		at(3500, "\x1b[?1049l"),
	}}
	got := render(t, r, options{title: "a & b", label: `"label"`, speed: 2, step: 100 * time.Millisecond, hold: time.Second})
	p := parseSVG(t, got)
	want := []screenText{{"one <&>", "red|▁▂|far"}, {"one <&>", "> two "}, {"three", "up", "x"}}
	// The style changes between "one" and "<&>".
	want[0][0], want[1][0] = "one|<&>", "one|<&>"
	if !slices.EqualFunc(p.frames, want, slices.Equal) {
		t.Errorf("the frames are %q, want %q", p.frames, want)
	}

	// Two seconds at double speed, and one of the last frame: the frames are at 0, 0.25 and 1 s of 2 s.
	var times, offsets []string
	for _, m := range keyframe.FindAllStringSubmatch(got, -1) {
		times, offsets = append(times, m[1]), append(offsets, m[2])
	}
	if want := []string{"0.000", "12.500", "50.000"}; !slices.Equal(times, want) {
		t.Errorf("the frames are at %v %%, want %v", times, want)
	}
	if want := []string{"0", "-57", "-114"}; !slices.Equal(offsets, want) {
		t.Errorf("the film is at %v, want %v", offsets, want)
	}
	for _, want := range []string{
		"animation: film 2s step-end infinite", `aria-label="&#34;label&#34;"`, "a &amp; b", "prefers-color-scheme: dark", "prefers-reduced-motion",
		`<text x="0" y="14" textLength="25.2" class="bold">one</text>`, `class="c1">red<`, `<rect x="0" width="50.4" height="19" class="back"/>`, `class="reverse">&gt; two `,
		".film { transform: translateY(-114px); }", // without motion: the last frame
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the picture does not contain %s", want)
		}
	}
	for _, bad := range []string{"<script", "javascript:", "@import", "url("} {
		if strings.Contains(got, bad) {
			t.Errorf("the picture contains %s", bad)
		}
	}
}

// A row that several frames show is in the picture once.
func TestRender_SharesRows(t *testing.T) {
	r := &recording{columns: 80, rows: 24}
	for i := range 100 {
		r.output = append(r.output, output{time.Duration(i) * time.Second, fmt.Sprintf("\x1b[H%s\r\n%d", strings.Repeat("same ", 15), i%5)})
	}
	got := render(t, r, options{speed: 1, step: time.Second, hold: time.Second})
	if p := parseSVG(t, got); len(p.frames) != 100 || len(p.rows) != 6 {
		t.Errorf("%d frames have %d different rows, want 100 and 6", len(p.frames), len(p.rows))
	}
}

func TestFrames_Errors(t *testing.T) {
	for text, want := range map[string]string{
		"\x1b[2J":          "the terminal stays blank",
		"\x1b[41mred":      "at 0s: row 1, column 1: unsupported background",
		"a\x1b[38;5;200mb": "at 0s: row 1, column 2: unsupported color",
	} {
		r := &recording{10, 2, []output{{0, text}}}
		if _, err := r.frames(time.Second); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
}
