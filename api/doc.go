// Package api is the API of the daemon: the types of its requests and responses, and a client
// of the control socket. It has no part of the daemon, so that other programs may import it.
//
// The API is JSON over the control socket; the GET requests are also answered on the port of the
// dashboard. Rates are per second, durations in seconds, and points in time RFC 3339. Arrays are
// never null.
//
// openapi.json is generated from the types and their comments, by "go test ./control -run
// OpenAPI -update". A comment that begins with quoted words lists all values of the field. A
// field without omitempty is always present, and required in requests.
package api
