package config

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// maxReply is the maximum length of a reply, which has to fit the socket's buffer.
const maxReply = 4096

var (
	placeholder = regexp.MustCompile(`\{[a-z_]+\}`)

	// A word like this is the name of a reply, or a misspelled one: few clients could use it as a text.
	replyWord = regexp.MustCompile(`^[a-z0-9_-]+$`)

	// What is a name or not such a word, for editors.
	replyPattern = "^(" + strings.Join(shaper.ReplyNames(), "|") + ")$|[^a-z0-9_-]"

	// Placeholders of replies of limits, and of breakers.
	limitPlaceholders   = []string{shaper.RetryAfter, shaper.ReplyLimit, shaper.ReplyReason}
	breakerPlaceholders = []string{shaper.RetryAfter, shaper.ReplyReason}

	// A name has 64 letters at most, and reasons are shorter.
	longestValues = strings.NewReplacer(shaper.ReplyLimit, strings.Repeat("x", 64), shaper.ReplyReason, strings.Repeat("x", 64))
)

// replyType returns the type of the replies in which known are the placeholders.
func replyType(example string, known []string) valueType {
	return quantityType(fmt.Sprintf("%s, or a text of at most %d bytes", alternatives(shaper.ReplyNames()), maxReply), example, replyPattern,
		func(s string) (string, error) { return s, checkReply(s, known) }, asIs)
}

// checkReply reports what is wrong with s, the name of a reply or a text.
func checkReply(s string, known []string) error {
	if slices.Contains(shaper.ReplyNames(), s) {
		return nil
	}
	if replyWord.MatchString(s) {
		return errors.New(unknownValue(s, shaper.ReplyNames(), replySynonyms))
	}
	if s == "" || len(s) > maxReply {
		return fmt.Errorf("must be 1 to %d bytes, not %d bytes, or one of %s", maxReply, len(s), quotedAlternatives(shaper.ReplyNames()))
	}
	for _, p := range placeholder.FindAllString(s, -1) {
		if !slices.Contains(known, p) {
			return fmt.Errorf("unknown placeholder %s: must be %s", quote(p), strings.Join(known, " or "))
		}
	}
	if n := len(longestValues.Replace(s)); n > maxReply {
		return fmt.Errorf("must be at most %d bytes, and may be %d with values in place of placeholders", maxReply, n)
	}
	return nil
}
