package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	uv "github.com/charmbracelet/ultraviolet"
	"github.com/charmbracelet/x/ansi"
	"github.com/charmbracelet/x/vt"
)

// A frame is what a terminal shows from an instant on.
type frame struct {
	at   time.Duration // since the first frame
	rows []row
}

// A row is text in runs of one style. Columns between the runs are blank.
type row []textRun

type textRun struct {
	column, columns int
	text            string
	style           style
}

// A style is the part of a terminal's styles that the pictures show.
type style struct {
	color                           int // of the 16 colors, or -1 for the default
	bold, faint, underline, reverse bool
}

// frames plays the recording in a terminal emulator, and returns its screen at multiples of step,
// without blank ones at the beginning and at the end.
func (r *recording) frames(step time.Duration) (list []frame, err error) {
	// The program got its answers when it was recorded.
	emulator, end := newEmulator(r, io.Discard)
	defer end()
	next := func(at time.Duration) error {
		rows, err := screen(emulator)
		if err != nil {
			return fmt.Errorf("at %v: %w", at, err)
		}
		if n := len(list); n > 0 && slices.EqualFunc(list[n-1].rows, rows, slices.Equal) {
			return nil
		}
		list = append(list, frame{at, rows})
		return nil
	}
	due := step // the end of the present interval
	for i, o := range r.output {
		if o.at >= due {
			if i > 0 {
				if err := next(due - step); err != nil {
					return nil, err
				}
			}
			due = o.at.Truncate(step) + step
		}
		if _, err := emulator.WriteString(o.text); err != nil {
			return nil, err
		}
	}
	if err := next(due - step); err != nil {
		return nil, err
	}
	blank := func(f frame) bool { return !slices.ContainsFunc(f.rows, func(r row) bool { return len(r) > 0 }) }
	for len(list) > 0 && blank(list[0]) {
		list = list[1:]
	}
	for len(list) > 0 && blank(list[len(list)-1]) {
		list = list[:len(list)-1]
	}
	if len(list) == 0 {
		return nil, errors.New("the terminal stays blank")
	}
	start := list[0].at
	for i := range list {
		list[i].at -= start
	}
	return list, nil
}

// newEmulator returns a terminal of the recording's size. It writes what it answers to a program's
// questions to answers, until end is called.
func newEmulator(r *recording, answers io.Writer) (e *vt.Emulator, end func()) {
	e = vt.NewEmulator(r.columns, r.rows)
	var copying sync.WaitGroup
	copying.Go(func() {
		io.Copy(answers, e)
		io.Copy(io.Discard, e) // the program has ended, but the emulator may answer
	})
	return e, func() {
		e.InputPipe().(io.Closer).Close() // not e itself, whose Close must not run during a Read
		copying.Wait()
	}
}

// screen returns the rows of a terminal.
func screen(e *vt.Emulator) (rows []row, err error) {
	for y := range e.Height() {
		var r row
		blanks := 2 // before the present column
		for x := range e.Width() {
			c := e.CellAt(x, y)
			if c == nil || c.Width == 0 { // after a wide character
				continue
			}
			s, err := newStyle(c)
			if err != nil {
				return nil, fmt.Errorf("row %d, column %d: %w", y+1, x+1, err)
			}
			text := c.Content
			if text == "" {
				text = " "
			}
			if text == " " && !s.reverse && !s.underline {
				blanks++
				continue
			}
			// A single blank is part of a run. After more of them the next run has a position of its own,
			// so that columns stay in line whatever the font.
			if n := len(r); n > 0 && blanks < 2 && r[n-1].style == s && isASCII(r[n-1].text) == isASCII(text) {
				r[n-1].text += strings.Repeat(" ", blanks) + text
				r[n-1].columns += blanks + c.Width
			} else {
				r = append(r, textRun{x, c.Width, text, s})
			}
			blanks = 0
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// isASCII reports whether the first character of text is ASCII. Other characters are often of
// another font, with another width.
func isASCII(text string) bool { return text[0] < utf8.RuneSelf }

func newStyle(c *uv.Cell) (style, error) {
	const known = uv.AttrBold | uv.AttrFaint | uv.AttrReverse
	s := style{
		color: -1, bold: c.Style.Attrs&uv.AttrBold != 0, faint: c.Style.Attrs&uv.AttrFaint != 0,
		reverse: c.Style.Attrs&uv.AttrReverse != 0, underline: c.Style.Underline != uv.UnderlineNone,
	}
	switch fg := c.Style.Fg.(type) {
	case nil:
	case ansi.BasicColor:
		s.color = int(fg)
	default:
		return s, fmt.Errorf("unsupported color %v", fg)
	}
	if c.Style.Bg != nil || c.Style.Attrs&^known != 0 {
		return s, fmt.Errorf("unsupported background %v, or attributes %#x", c.Style.Bg, c.Style.Attrs)
	}
	return s, nil
}
