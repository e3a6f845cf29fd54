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

	"shaperd.dev/shaperd/api"
)

// writeJSON writes v as the response.
func writeJSON(w http.ResponseWriter, code int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		code = http.StatusInternalServerError
		text, _ = json.Marshal(api.Error{Message: err.Error()})
	}
	setHeaders(w, "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(text, '\n')) // the client may be gone
}

func setHeaders(w http.ResponseWriter, contentType string) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
}

func badRequest(w http.ResponseWriter, format string, args ...any) {
	writeJSON(w, http.StatusBadRequest, api.Error{Message: fmt.Sprintf(format, args...)})
}

// writeError writes err as the response, and reports whether it is not nil.
func writeError(w http.ResponseWriter, err error) bool {
	if err == nil {
		return false
	}
	code := http.StatusInternalServerError
	switch {
	case errors.Is(err, ErrUnknown):
		code = http.StatusNotFound
	case errors.Is(err, ErrRefused):
		code = http.StatusUnprocessableEntity
	case errors.Is(err, ErrStopping), errors.Is(err, context.Canceled): // the client is gone
		code = http.StatusServiceUnavailable
	}
	writeJSON(w, code, api.Error{Message: err.Error()})
	return true
}

// readBody decodes the body of a request into v, or writes an error and returns false.
func readBody(w http.ResponseWriter, q *http.Request, v any) bool {
	text, err := io.ReadAll(q.Body)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		writeJSON(w, http.StatusRequestEntityTooLarge, api.Error{Message: fmt.Sprintf("the request body is larger than %d bytes", large.Limit)})
		return false
	}
	if err == nil {
		err = decode(text, v)
	}
	if err != nil {
		badRequest(w, "invalid request body: %s", strings.TrimPrefix(describeTypeError(text, err).Error(), "json: "))
		return false
	}
	return true
}

// describeTypeError returns err in terms of JSON if it is about a wrong type of a value of text.
func describeTypeError(text []byte, err error) error {
	var typeErr *json.UnmarshalTypeError
	if !errors.As(err, &typeErr) {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var before, found json.Token // found ends at the offset
	for d.InputOffset() < typeErr.Offset {
		before = found
		if found, err = d.Token(); err != nil {
			return err
		}
	}
	got, _ := json.Marshal(found)
	switch found {
	case json.Delim('['):
		got = []byte("an array")
	case json.Delim('{'):
		got = []byte("an object")
	}
	if len(got) > maxShown {
		got = append(got[:maxShown:maxShown], "..."...)
	}
	want := map[reflect.Kind]string{
		reflect.Bool: "true or false", reflect.String: "a string", reflect.Float64: "a number", reflect.Map: "an object", reflect.Struct: "an object",
	}[typeErr.Type.Kind()]
	if _, number := found.(json.Number); number && typeErr.Type.Kind() == reflect.Float64 {
		want = "a smaller number"
	}
	if typeErr.Field == "" {
		return fmt.Errorf("must be %s, not %s", want, got)
	}
	field := typeErr.Field
	if key, ok := before.(string); ok && key != field { // a value of a map
		field += "." + key
	}
	return fmt.Errorf("%s must be %s, not %s", field, want, got)
}

// maxShown bounds the part of a wrong value that an error quotes, in bytes.
const maxShown = 40

// decode decodes text into v. All fields without omitempty are required.
func decode(text []byte, v any) error {
	if len(text) == 0 {
		return errors.New("empty")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	var given map[string]*json.RawMessage
	if err := json.Unmarshal(text, &given); err != nil { // there is trailing data
		return err
	}
	for f := range reflect.TypeOf(v).Elem().Fields() {
		name, option, _ := strings.Cut(f.Tag.Get("json"), ",")
		if option != "omitempty" && given[name] == nil {
			return fmt.Errorf("missing %q", name)
		}
	}
	return nil
}

// maxDuration is the maximum duration of a change.
const maxDuration = 366 * 24 * time.Hour

// durationOf converts the duration of a change; 0 is no end. It writes an error if it is out of range.
func durationOf(w http.ResponseWriter, seconds float64) (time.Duration, bool) {
	if !(seconds >= 0 && seconds <= maxDuration.Seconds()) {
		badRequest(w, "duration_seconds: %v is out of range: must be from 0 to %.0f (366 days)", seconds, maxDuration.Seconds())
		return 0, false
	}
	d := time.Duration(seconds * float64(time.Second))
	if d == 0 && seconds > 0 { // it would mean no end
		badRequest(w, "duration_seconds: %v is out of range: must be at least 1e-9", seconds)
		return 0, false
	}
	return d, true
}

// topParam parses the parameter "top", or writes an error.
func topParam(w http.ResponseWriter, q *http.Request, byDefault, maxTop int) (int, bool) {
	text := q.URL.Query().Get("top")
	if text == "" {
		return byDefault, true
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > maxTop {
		badRequest(w, "top: invalid value %q: must be from 1 to %d", text, maxTop)
		return 0, false
	}
	return n, true
}

// enumParam parses a parameter that must be a key of choices, or writes an error.
func enumParam[T any](w http.ResponseWriter, q *http.Request, name, byDefault string, choices map[string]T) (choice T, word string, ok bool) {
	if word = q.URL.Query().Get(name); word == "" {
		word = byDefault
	}
	if choice, ok = choices[word]; !ok {
		badRequest(w, "%s: invalid value %q: must be %s", name, word, oneOf(choices))
	}
	return choice, word, ok
}
