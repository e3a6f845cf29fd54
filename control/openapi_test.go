package control

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers/legacy"
	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/internal/fakes"
	"shaperd.dev/shaperd/internal/testutil"
)

var update = flag.Bool("update", false, "write api/openapi.json")

type object = map[string]any

// Every route has an entry in endpoints, and openapi.json is generated from these, the types of
// package api, and routes.
func TestOpenAPI_UpToDate(t *testing.T) {
	b, err := json.MarshalIndent(describe(t), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	b = append(b, '\n')
	if *update {
		if err := os.WriteFile("../api/openapi.json", b, 0o644); err != nil {
			t.Fatal(err)
		}
		api.OpenAPI = b
	} else if d := cmp.Diff(string(api.OpenAPI), string(b)); d != "" {
		t.Errorf("api/openapi.json is outdated, run \"go test ./control -run OpenAPI -update\":\n%s", d)
	}
	doc, err := openapi3.NewLoader().LoadFromData(b)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Error(err)
	}
}

func init() { openapi3filter.RegisterBodyDecoder("text/html", openapi3filter.FileBodyDecoder) }

// Each endpoint responds over the socket as the file says, and each response in the file occurs.
func TestOpenAPI_MatchesResponses(t *testing.T) {
	doc, err := openapi3.NewLoader().LoadFromData(api.OpenAPI)
	if err != nil {
		t.Fatal(err)
	}
	router, err := legacy.NewRouter(doc)
	if err != nil {
		t.Fatal(err)
	}
	daemon := &fakeDaemon{}
	o := options(t, fakes.Shaper(t, 2))
	o.Daemon = daemon
	slog.New(o.Events.Handler(slog.DiscardHandler)).Info("ready", "a", "b")
	client := testutil.UnixClient(t, serveOn(t, o, -1, nil).socket.path)
	for _, r := range (&handlers{}).routes() {
		method, path, _ := strings.Cut(r.pattern, " ")
		t.Run(r.pattern, func(t *testing.T) {
			seen := map[int]bool{}
			for _, ask := range endpoints[r.pattern].asks {
				daemon.err = ask.err
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				q, err := http.NewRequestWithContext(ctx, method, "http://shaperd"+ask.target(path), strings.NewReader(ask.body))
				if err != nil {
					t.Fatal(err)
				}
				if ask.body != "" {
					q.Header.Set("Content-Type", "application/json")
				}
				route, params, err := router.FindRoute(q)
				if err != nil {
					t.Fatal(err)
				}
				in := &openapi3filter.RequestValidationInput{Request: q.Clone(ctx), PathParams: params, Route: route}
				in.Request.Body = io.NopCloser(strings.NewReader(ask.body))
				if err := openapi3filter.ValidateRequest(ctx, in); (err == nil) != (ask.code < 400 || ask.fine) {
					t.Errorf("%+v: request validation: %v", ask, err)
				}
				a, err := client.Do(q)
				if err != nil {
					t.Fatal(err)
				}
				defer a.Body.Close()
				if a.StatusCode != ask.code {
					text, _ := io.ReadAll(a.Body)
					t.Errorf("%+v: %d, %s", ask, a.StatusCode, text)
				}
				seen[a.StatusCode] = true
				if a.Header.Get("Content-Type") == "text/event-stream" {
					continue
				}
				body, err := io.ReadAll(a.Body)
				if err != nil {
					t.Fatal(err)
				}
				out := &openapi3filter.ResponseValidationInput{
					RequestValidationInput: in, Status: a.StatusCode, Header: a.Header, Body: io.NopCloser(bytes.NewReader(body)),
					Options: &openapi3filter.Options{IncludeResponseStatus: true},
				}
				if err := openapi3filter.ValidateResponse(ctx, out); err != nil {
					t.Errorf("%+v: response validation: %v", ask, err)
				}
			}
			for _, code := range append([]int{http.StatusOK}, endpoints[r.pattern].errors...) {
				if !seen[code] {
					t.Errorf("no response with status %d", code)
				}
			}
		})
	}
}

// GET /v1/live sends a Live as specified in the file.
func TestOpenAPI_Live(t *testing.T) {
	doc, err := openapi3.NewLoader().LoadFromData(api.OpenAPI)
	if err != nil {
		t.Fatal(err)
	}
	o := options(t, fakes.Shaper(t, 2))
	client := testutil.UnixClient(t, serveOn(t, o, -1, nil).socket.path)
	a, err := client.Get("http://shaperd/v1/live")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	var live any
	if err := json.Unmarshal(firstEvent(t, a.Body), &live); err != nil {
		t.Fatal(err)
	}
	if err := doc.Components.Schemas["Live"].Value.VisitJSON(live, openapi3.EnableJSONSchema2020()); err != nil {
		t.Error(err)
	}
}

// serveOn serves o on a socket that any user may connect to; only members of the group gid have
// the role Reader. tune changes the server, which is patient.
func serveOn(t *testing.T, o *Options, gid int, tune func(*http.Server)) *Server {
	t.Helper()
	socket, err := listenSocket(socketPath(t), gid, o.Log)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(socket.path, 0o666); err != nil {
		t.Fatal(err)
	}
	h := newServer(newAPI(o))
	patient(h)
	if tune != nil {
		tune(h)
	}
	s := serveAPI(socket, h)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// describe returns the content of openapi.json.
func describe(t *testing.T) object {
	types := &schemas{t: t, comments: comments(t), made: object{}}
	paths := object{}
	left := maps.Clone(endpoints)
	for _, r := range (&handlers{}).routes() {
		e, ok := endpoints[r.pattern]
		if !ok {
			t.Errorf("endpoints has no entry %s", r.pattern)
		}
		delete(left, r.pattern)
		method, path, _ := strings.Cut(r.pattern, " ")
		if paths[path] == nil {
			paths[path] = object{}
		}
		paths[path].(object)[strings.ToLower(method)] = e.describe(r.role, path, types)
	}
	for pattern := range left {
		t.Errorf("no route for %s", pattern)
	}
	types.of(reflect.TypeFor[api.Live]())
	return object{
		"openapi": "3.1.0",
		"info": object{
			"title": "shaperd control API", "version": "1",
			"license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"},
			"description": "API of a running shaperd. Rates are per second, durations in seconds, and points in time RFC 3339. " +
				"x-role is the role that an endpoint requires: members of the group \"shaperd\" are readers; root and the user of the daemon are admins, who may also use all endpoints of readers. " +
				"The endpoints of readers are also served without authentication on the port of the dashboard.",
		},
		"servers": []any{object{
			"url":         "http://shaperd",
			"description": "curl --unix-socket " + api.DefaultSocket + " http://shaperd/v1/status",
		}},
		"paths":      paths,
		"components": object{"schemas": types.made},
	}
}

// schemas are the schemas of the types of package api.
type schemas struct {
	t        *testing.T
	comments map[string]string // of types, and of fields as "Type.Field"
	made     object
}

// enum matches the quoted words at the begin of a comment.
var enum = regexp.MustCompile(`^"[a-z-]+"(?:, "[a-z-]+")+(?:$|[^,])`)

func (s *schemas) of(t reflect.Type) object {
	switch t.Kind() {
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.String:
		return object{"type": "string"}
	case reflect.Float64:
		return object{"type": "number", "format": "double"}
	case reflect.Int, reflect.Int64:
		return object{"type": "integer", "format": "int64"}
	case reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return object{"type": "integer", "format": "int64", "minimum": 0}
	case reflect.Slice:
		return object{"type": "array", "items": s.of(t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": s.of(t.Elem())}
	case reflect.Pointer:
		return s.of(t.Elem())
	case reflect.Struct:
	default:
		s.t.Fatalf("unsupported type in the API: %v", t)
	}
	if t == reflect.TypeFor[time.Time]() {
		return object{"type": "string", "format": "date-time"}
	}
	if t.NumField() == 0 {
		return object{"type": "object"}
	}
	ref := object{"$ref": "#/components/schemas/" + t.Name()}
	if s.made[t.Name()] != nil {
		return ref
	}
	properties, required := object{}, []string{}
	s.made[t.Name()] = object{"type": "object", "description": s.comments[t.Name()], "properties": properties, "required": required}
	for f := range t.Fields() {
		name, may, _ := strings.Cut(f.Tag.Get("json"), ",")
		field := s.of(f.Type)
		if text := s.comments[t.Name()+"."+f.Name]; text != "" {
			field["description"] = text
			if found := enum.FindString(text); found != "" {
				field["enum"] = regexp.MustCompile(`[a-z-]+`).FindAllString(found, -1)
			}
		}
		if name == "duration_seconds" && strings.HasPrefix(t.Name(), "Set") {
			field["minimum"], field["maximum"] = 0, maxDuration.Seconds()
		}
		properties[name] = field
		if may != "omitempty" {
			required = append(required, name)
		}
	}
	made := s.made[t.Name()].(object)
	if made["required"] = required; len(required) == 0 {
		delete(made, "required")
	}
	if strings.HasPrefix(t.Name(), "Set") { // unknown fields of a request are rejected
		made["additionalProperties"] = false
		for _, p := range properties {
			if p := p.(object); p["type"] == "object" {
				p["minProperties"] = 1
			}
		}
	}
	return ref
}

// comments returns the comments of the types of package api.
func comments(t *testing.T) map[string]string {
	var decls []ast.Decl
	for _, path := range []string{"../api/types.go", "../api/explanation.go", "../api/limit.go", "../api/requests.go", "../api/shared.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		decls = append(decls, file.Decls...)
	}
	text := func(groups ...*ast.CommentGroup) string {
		for _, g := range groups {
			if s := strings.Join(strings.Fields(g.Text()), " "); s != "" {
				return s
			}
		}
		return ""
	}
	all := map[string]string{}
	for _, d := range decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.TYPE {
			continue
		}
		spec := g.Specs[0].(*ast.TypeSpec)
		all[spec.Name.Name] = text(g.Doc)
		for _, f := range spec.Type.(*ast.StructType).Fields.List {
			for _, name := range f.Names {
				all[spec.Name.Name+"."+name.Name] = text(f.Comment, f.Doc)
			}
		}
	}
	return all
}

func (e endpoint) describe(role Role, path string, types *schemas) object {
	op := object{"summary": e.says, "x-role": role.String()}
	params := []any{}
	for _, name := range regexp.MustCompile(`{(\w+)}`).FindAllStringSubmatch(path, -1) {
		params = append(params, object{"name": name[1], "in": "path", "required": true, "schema": pathSchemas[name[1]]})
	}
	for _, name := range slices.Sorted(maps.Keys(e.query)) {
		p := e.query[name]
		params = append(params, object{"name": name, "in": p.in(), "required": p.required, "description": p.says, "schema": p.schema})
	}
	if len(params) > 0 {
		op["parameters"] = params
	}
	if e.body != nil {
		op["requestBody"] = object{"required": true, "content": object{"application/json": object{"schema": types.of(reflect.TypeOf(e.body))}}}
	}
	schema := object{}
	if e.answer != nil {
		schema = types.of(reflect.TypeOf(e.answer))
	}
	answers := object{"200": object{"description": "Success.", "content": object{e.media(): object{"schema": schema}}}}
	wrong := object{"application/json": object{"schema": types.of(reflect.TypeFor[api.Error]())}}
	for code, text := range e.codes(role) {
		content := wrong
		if s, ok := e.instead[code]; ok {
			content = object{"application/json": object{"schema": types.of(reflect.TypeOf(s))}}
		}
		answers[strconv.Itoa(code)] = object{"description": text, "content": content}
	}
	op["responses"] = answers
	return op
}
