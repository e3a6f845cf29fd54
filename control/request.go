package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// answer writes v.
func answer(w http.ResponseWriter, code int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		code = http.StatusInternalServerError
		text, _ = json.Marshal(Error{err.Error()})
	}
	header(w, "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(text, '\n')) // the client may have left
}

func header(w http.ResponseWriter, contentType string) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
}

func bad(w http.ResponseWriter, format string, args ...any) {
	answer(w, http.StatusBadRequest, Error{fmt.Sprintf(format, args...)})
}

// failed answers err, if it is one.
func failed(w http.ResponseWriter, err error) bool {
	if err == nil {
		return false
	}
	code := http.StatusInternalServerError
	switch {
	case errors.Is(err, ErrUnknown):
		code = http.StatusNotFound
	case errors.Is(err, ErrRefused):
		code = http.StatusUnprocessableEntity
	case errors.Is(err, ErrEnding), errors.Is(err, context.Canceled): // of a client that left
		code = http.StatusServiceUnavailable
	}
	answer(w, code, Error{err.Error()})
	return true
}

// body reads the body of a request, and answers where that is no v.
func body(w http.ResponseWriter, q *http.Request, v any) bool {
	text, err := io.ReadAll(q.Body)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		answer(w, http.StatusRequestEntityTooLarge, Error{fmt.Sprintf("the body is larger than %d bytes", maxBody)})
		return false
	}
	if err == nil {
		err = decode(text, v)
	}
	if err != nil {
		bad(w, "invalid request body: %s", strings.TrimPrefix(mistyped(text, err).Error(), "json: "))
		return false
	}
	return true
}

// mistyped returns err in words of JSON, if it is that a value of text has the wrong type.
func mistyped(text []byte, err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var before, found json.Token // the last ends at the offset
	for d.InputOffset() < wrong.Offset {
		before = found
		if found, err = d.Token(); err != nil {
			return err
		}
	}
	is, _ := json.Marshal(found)
	switch found {
	case json.Delim('['):
		is = []byte("an array")
	case json.Delim('{'):
		is = []byte("an object")
	}
	if len(is) > mostShown {
		is = append(is[:mostShown:mostShown], "..."...)
	}
	wants := map[reflect.Kind]string{
		reflect.Bool: "true or false", reflect.String: "a string", reflect.Float64: "a number", reflect.Map: "an object", reflect.Struct: "an object",
	}[wrong.Type.Kind()]
	if _, number := found.(json.Number); number && wrong.Type.Kind() == reflect.Float64 {
		wants = "a smaller number"
	}
	if wrong.Field == "" {
		return fmt.Errorf("it must be %s, not %s", wants, is)
	}
	field := wrong.Field
	if key, ok := before.(string); ok && key != field { // it is a value of a map
		field += "." + key
	}
	return fmt.Errorf("%s must be %s, not %s", field, wants, is)
}

// mostShown bounds how much of a wrong value an error repeats, bytes.
const mostShown = 40

// decode reads v from text, which has all of its fields but those that may be left out.
func decode(text []byte, v any) error {
	if len(text) == 0 {
		return errors.New("it is empty")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	var given map[string]*json.RawMessage
	if err := json.Unmarshal(text, &given); err != nil { // there is more behind it
		return err
	}
	for f := range reflect.TypeOf(v).Elem().Fields() {
		name, may, _ := strings.Cut(f.Tag.Get("json"), ",")
		if may != "omitempty" && given[name] == nil {
			return fmt.Errorf("%q is missing", name)
		}
	}
	return nil
}

// longest is for how long a change may be asked to last.
const longest = 366 * 24 * time.Hour

// lasting reads for how long a change is to last, in seconds; 0 is as long as may be.
func lasting(w http.ResponseWriter, seconds float64) (time.Duration, bool) {
	if !(seconds >= 0 && seconds <= longest.Seconds()) {
		bad(w, "for: %v seconds: from 0 to %.0f, which is 366 days", seconds, longest.Seconds())
		return 0, false
	}
	d := time.Duration(seconds * float64(time.Second))
	if d == 0 && seconds > 0 { // which would be as long as may be
		bad(w, "for: %v seconds are none", seconds)
		return 0, false
	}
	return d, true
}

// top reads how many are asked for.
func top(w http.ResponseWriter, q *http.Request, usual, most int) (int, bool) {
	text := q.URL.Query().Get("top")
	if text == "" {
		return usual, true
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		bad(w, "top: %q: a number from 1 to %d", text, most)
		return 0, false
	}
	return n, true
}

// word reads one of the words that choices has.
func word[T any](w http.ResponseWriter, q *http.Request, name, usual string, choices map[string]T) (choice T, word string, ok bool) {
	if word = q.URL.Query().Get(name); word == "" {
		word = usual
	}
	if choice, ok = choices[word]; !ok {
		bad(w, "%s: %q: %s", name, word, oneOf(choices))
	}
	return choice, word, ok
}
