// Package peer lets daemons serve the ledger of shared limits to each other, where there is no Redis. A
// call is a POST with JSON over HTTP and mutual TLS 1.3.
//
// Who has a certificate that an authority of the group has signed may call, for the host that the
// certificate names: by a DNS name, or the first label of one, or the common name. The ledger is in
// memory. A daemon that starts again has an empty one, which begins a new epoch.
package peer
