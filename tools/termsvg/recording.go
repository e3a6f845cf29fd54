package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// A recording is what a program wrote to a terminal, and when.
type recording struct {
	columns, rows int
	output        []output // in order of time
}

type output struct {
	at   time.Duration // since the start
	text string
}

// header is the first line of an asciicast.
type header struct {
	Version int `json:"version"`
	Width   int `json:"width"`
	Height  int `json:"height"`
}

// write writes the recording as an asciicast.
func (r *recording) write(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	err := enc.Encode(header{2, r.columns, r.rows})
	for _, o := range r.output {
		err = errors.Join(err, enc.Encode([]any{o.at.Round(time.Millisecond).Seconds(), "o", o.text}))
	}
	return err
}

// readRecording reads an asciicast. It ignores events other than output.
func readRecording(from io.Reader) (*recording, error) {
	dec := json.NewDecoder(bufio.NewReader(from))
	var h header
	if err := dec.Decode(&h); err != nil {
		return nil, fmt.Errorf("read the header: %w", err)
	}
	if h.Version != 2 || h.Width < 1 || h.Height < 1 {
		return nil, fmt.Errorf("unsupported header: version %d, %d columns, %d rows", h.Version, h.Width, h.Height)
	}
	r := &recording{columns: h.Width, rows: h.Height}
	for {
		var event [3]any
		switch err := dec.Decode(&event); {
		case errors.Is(err, io.EOF):
			return r, nil
		case err != nil:
			return nil, fmt.Errorf("read event %d: %w", len(r.output)+1, err)
		}
		seconds, isTime := event[0].(float64)
		text, isText := event[2].(string)
		if !isTime || !isText {
			return nil, fmt.Errorf("event %v is not a time, a code and a text", event)
		}
		if event[1] != "o" {
			continue
		}
		at := time.Duration(seconds * float64(time.Second))
		if n := len(r.output); n > 0 && at < r.output[n-1].at {
			return nil, fmt.Errorf("the event at %v is after one at %v", at, r.output[n-1].at)
		}
		r.output = append(r.output, output{at, text})
	}
}
