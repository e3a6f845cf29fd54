package shaper

// Placeholders in the text of a reply.
const (
	// RetryAfter becomes the seconds after which the client may try again, or 60 if that is not known.
	RetryAfter = "{retry_after}"

	// ReplyLimit becomes the name of the limit. A breaker has none.
	ReplyLimit = "{limit}"

	// ReplyReason becomes the [Reason] of the refusal, or "breaker-open".
	ReplyReason = "{reason}"
)

// Names of replies in place of a text: each speaks a protocol so far that a client of it shows why it was refused.
const (
	ReplyHTTP429    = "http-429"
	ReplyHTTP503    = "http-503"
	ReplyPostgreSQL = "postgres"
	ReplyMySQL      = "mysql"
	ReplyRedis      = "redis"
	ReplySMTP       = "smtp"
	ReplySMPP       = "smpp"
	ReplyModbus     = "modbus"
)

// ReplyNames returns the names of replies.
func ReplyNames() []string {
	return []string{ReplyHTTP429, ReplyHTTP503, ReplyPostgreSQL, ReplyMySQL, ReplyRedis, ReplySMTP, ReplySMPP, ReplyModbus}
}
