package redis

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Bounds of a reply. The daemon must survive whatever a store, a proxy or another server answers, so
// nothing is allocated for what a header promises and the connection has not delivered.
const (
	maxReply   = 16 << 20 // bytes
	maxNesting = 6        // arrays in arrays
	maxLine    = 4 << 10  // bytes of a line, which has a number or an error
	maxErrText = 200      // bytes of a server's error that are shown
)

// errProtocol is wrapped by errors about bytes that are no reply. They do not show the bytes: some servers repeat
// what they were sent, and that may have been the password.
var errProtocol = errors.New("not a reply of a Redis server")

// serverError is an error reply. Its text is the server's.
type serverError string

func (e serverError) Error() string {
	text := string(e)
	if len(text) > maxErrText {
		text = text[:maxErrText] + "..."
	}
	return "the server says " + strconv.Quote(text)
}

// code returns the first word of an error reply, such as NOSCRIPT.
func (e serverError) code() string {
	for i := range len(e) {
		if e[i] == ' ' {
			return string(e[:i])
		}
	}
	return string(e)
}

// appendCommand appends a command in the protocol RESP 2.
func appendCommand(b []byte, args ...string) []byte {
	b = appendHeader(b, '*', len(args))
	for _, a := range args {
		b = appendHeader(b, '$', len(a))
		b = append(b, a...)
		b = append(b, '\r', '\n')
	}
	return b
}

func appendHeader(b []byte, kind byte, n int) []byte {
	b = append(b, kind)
	b = strconv.AppendInt(b, int64(n), 10)
	return append(b, '\r', '\n')
}

// readReply reads one reply: an int64, a string, nil, a []any of these, or a serverError. After an
// error, nothing more can be read from r, which has a buffer of at least maxLine.
func readReply(r *bufio.Reader) (any, error) {
	d := decoder{r, maxReply}
	return d.value(0)
}

type decoder struct {
	r    *bufio.Reader
	left int // bytes that the reply may still have
}

func (d *decoder) value(depth int) (any, error) {
	line, err := d.line()
	if err != nil {
		return nil, err
	}
	kind, text := line[0], line[1:]
	switch kind {
	case '+':
		return string(text), nil
	case '-':
		if depth > 0 {
			return nil, fmt.Errorf("%w: an error in an array", errProtocol)
		}
		return serverError(text), nil
	}
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: of no kind, or without number", errProtocol)
	}
	switch {
	case kind == ':':
		return n, nil
	case (kind == '$' || kind == '*') && n == -1:
		return nil, nil
	case kind == '$' && n >= 0 && n <= int64(d.left):
		return d.text(int(n))
	case kind == '*' && n >= 0 && n <= int64(d.left) && depth < maxNesting:
		return d.array(int(n), depth+1)
	}
	return nil, fmt.Errorf("%w: of no kind, or too large", errProtocol)
}

// line reads a line, of which at least one byte is before its end.
func (d *decoder) line() ([]byte, error) {
	line, err := d.r.ReadSlice('\n')
	if err != nil {
		if errors.Is(err, bufio.ErrBufferFull) {
			return nil, fmt.Errorf("%w: a line of more than %d bytes", errProtocol, len(line))
		}
		return nil, noEOF(err)
	}
	if d.left -= len(line); d.left < 0 || len(line) < 3 || line[len(line)-2] != '\r' {
		return nil, fmt.Errorf("%w: a line without its end, or too much", errProtocol)
	}
	return line[:len(line)-2], nil
}

func (d *decoder) text(n int) (any, error) {
	text := make([]byte, n+2)
	if _, err := io.ReadFull(d.r, text); err != nil {
		return nil, noEOF(err)
	}
	d.left -= len(text)
	if text[n] != '\r' || text[n+1] != '\n' {
		return nil, fmt.Errorf("%w: a text of another length", errProtocol)
	}
	return string(text[:n]), nil
}

func (d *decoder) array(n, depth int) (any, error) {
	values := make([]any, 0, min(n, 64))
	for range n {
		v, err := d.value(depth)
		if err != nil {
			return nil, err
		}
		values = append(values, v)
	}
	return values, nil
}

// noEOF makes the end of a connection one that was not expected.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("the server closed the connection")
	}
	return err
}
