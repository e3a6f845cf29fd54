package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// A keyPress is text that is typed at an instant.
type keyPress struct {
	at   time.Duration
	text string
}

var namedKeys = map[string]string{
	"enter": "\r", "esc": "\x1b", "tab": "\t", "space": " ",
	"up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D",
}

func parseKeys(list string) (presses []keyPress, err error) {
	if list == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		when, key, _ := strings.Cut(strings.TrimSpace(part), " ")
		p := keyPress{text: namedKeys[key]}
		if p.text == "" {
			p.text = key
		}
		if p.at, err = time.ParseDuration(when); err != nil || key == "" {
			return nil, fmt.Errorf("keys: %q is not an instant and a key, such as \"2s enter\"", part)
		}
		presses = append(presses, p)
	}
	return presses, nil
}

// record runs a command in a pseudo-terminal of the recording's size, and appends its output to
// the recording and to echo. It ends the command with SIGTERM when ctx ends, and then returns nil.
func record(ctx context.Context, r *recording, args []string, presses []keyPress, echo io.Writer) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "TERM=xterm-256color", "COLORTERM=")
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	start := time.Now()
	terminal, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: uint16(r.columns), Rows: uint16(r.rows)})
	if err != nil {
		return err
	}
	// A program may ask the terminal what it is. The emulator answers.
	emulator, endAnswers := newEmulator(r, terminal)
	var typing sync.WaitGroup
	ended, end := context.WithCancel(context.Background())
	typing.Go(func() {
		for _, p := range presses {
			select {
			case <-ended.Done():
				return
			case <-time.After(time.Until(start.Add(p.at))):
				io.WriteString(terminal, p.text)
			}
		}
	})
	read := r.append(terminal, start, io.MultiWriter(emulator, echo))
	err = cmd.Wait()
	end()
	typing.Wait()
	endAnswers()
	terminal.Close()
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", args[0], err)
	}
	return errors.Join(err, read)
}

// append reads the output of a terminal until its program has ended.
func (r *recording) append(terminal io.Reader, start time.Time, echo io.Writer) error {
	buffer := make([]byte, 1<<16)
	kept := 0 // bytes of a rune that is not complete
	for {
		n, err := terminal.Read(buffer[kept:])
		text := buffer[:kept+n]
		whole := completeRunes(text)
		if len(whole) > 0 {
			if _, err := echo.Write(whole); err != nil {
				return err
			}
			r.output = append(r.output, output{time.Since(start), string(whole)})
		}
		kept = copy(buffer, text[len(whole):])
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, unix.EIO): // EIO: Linux, when the last process has closed it
			return nil
		case err != nil:
			return err
		}
	}
}

// completeRunes returns text without an incomplete rune at its end.
func completeRunes(text []byte) []byte {
	for i := len(text) - 1; i >= 0 && i >= len(text)-utf8.UTFMax; i-- {
		if utf8.RuneStart(text[i]) {
			if !utf8.FullRune(text[i:]) {
				return text[:i]
			}
			break
		}
	}
	return text
}
