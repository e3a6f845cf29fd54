package api

import _ "embed"

// OpenAPI describes the API. It is generated from the types and their comments, and from the
// routes of package control, by "go test ./control -run OpenAPI -update".
//
//go:embed openapi.json
var OpenAPI []byte
