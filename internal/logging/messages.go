package logging

import "strings"

// messageIDs are the MESSAGE_ID fields of the events that an operator acts on, by the text of the
// record up to its first colon or semicolon. systemd/shaperd.catalog explains each.
var messageIDs = map[string]string{
	"ready":                               "01f3331b0e1942f18dfa4cad4515ee72",
	"stopping":                            "abe4017c675a46cdbb3895bc3cae82cd",
	"drain timed out":                     "142ec6951c5b41d4910f07c8f902b001",
	"reload failed":                       "1d7bff04ee0c4ed38dab6b67127bd212",
	"conformance violated":                "272f0e40e008405c912a71424f2f388d",
	"no downstream can be reached":        "7155ec84b0b946348523d4a4497a294f",
	"downstream is down":                  "acb022cae92f4f4486cfc8045edf4b70",
	"packet plane fault":                  "686ff3cc53054c6d87589e4f6bf75372",
	"interface removed":                   "ead804801a0b409fb974102107020b8e",
	"BYPASS is on":                        "2a82a064d13949d39ce30e5dcc09659e",
	"refused":                             "91fd6f9bdc6c407ab38fd15e581e055c",
	"connection refused":                  "56154cd7023f4723b8e141c2edd49315",
	"source penalized":                    "f542cfe3a9104711a9d4618304a3ae3d",
	"problem of shared limits":            "e59c4a7e8e1d4c069177c9cc9064217d",
	"sources not read again":              "72e9c07f954942beaa98fdeab3244bfa",
	"saving state failed":                 "fc72bfd848c741708ae630707edab38a",
	"control socket":                      "e96e24b34fcd46528bb6fa24d741a95b",
	"shedding begins":                     "0624c45b4ce944ad8168907d2fe342ca",
	"log records dropped":                 "b3deebedfd72441aaf0b67ec63763f2e",
	"override not restored after restart": "fc3d4994c56946ab8e83274a536c59e0",
}

// messageID returns the MESSAGE_ID of a record with a text; "" if it has none.
func messageID(text string) string {
	text = strings.TrimSuffix(text, " (repeated)")
	if i := strings.IndexAny(text, ":;"); i >= 0 {
		text = text[:i]
	}
	return messageIDs[text]
}
