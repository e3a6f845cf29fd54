package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
)

// askSentinels returns the address of the server that most Sentinels name. It asks all at once, and waits no
// longer than until a majority agrees.
func (t *target) askSentinels(ctx context.Context) (string, error) {
	type answer struct {
		address string
		err     error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer)
	for _, sentinel := range t.addresses {
		go func() {
			address, err := t.askSentinel(ctx, sentinel)
			answers <- answer{address, err}
		}()
	}
	votes := map[string]int{}
	var best string
	var errs []error
	for range t.addresses {
		a := <-answers
		if a.err != nil {
			errs = append(errs, a.err)
			continue
		}
		votes[a.address]++
		if votes[a.address] > votes[best] {
			best = a.address
		}
		if 2*votes[best] > len(t.addresses) {
			cancel() // the others end at once
		}
	}
	if best == "" {
		return "", errors.Join(errs...)
	}
	return best, nil
}

// askSentinel returns the address of the server, as one Sentinel has it.
func (t *target) askSentinel(ctx context.Context, sentinel string) (string, error) {
	c, err := t.dial(ctx, sentinel)
	if err != nil {
		return "", err
	}
	defer c.close()
	question := []string{"SENTINEL", "GET-MASTER-ADDR-BY-NAME", t.master}
	replies, err := c.do(ctx, question)
	if err == nil && needsPassword(replies[0]) && (t.Password != nil || t.Username != "") {
		// Only a Sentinel that asks for the password gets it.
		replies, err = t.askWithPassword(ctx, c, question)
	}
	if err != nil {
		return "", fmt.Errorf("ask the Sentinel at %s: %w", sentinel, err)
	}
	address, err := parseMaster(replies[0])
	if err != nil {
		return "", fmt.Errorf("ask the Sentinel at %s for %q: %w", sentinel, t.master, err)
	}
	return address, nil
}

func needsPassword(reply any) bool {
	e, refused := reply.(serverError)
	return refused && e.code() == "NOAUTH"
}

func (t *target) askWithPassword(ctx context.Context, c *conn, question []string) ([]any, error) {
	auth, err := t.auth()
	if err != nil {
		return nil, err
	}
	replies, err := c.do(ctx, auth, question)
	if err != nil {
		return nil, err
	}
	if e, refused := replies[0].(serverError); refused {
		return nil, fmt.Errorf("authenticate: %w", refusal(e))
	}
	return replies[1:], nil
}

func parseMaster(reply any) (string, error) {
	switch reply := reply.(type) {
	case nil:
		return "", errors.New("it knows no such server")
	case serverError:
		return "", refusal(reply)
	case []any:
		if len(reply) == 2 {
			host, _ := reply[0].(string)
			port, _ := reply[1].(string)
			if host != "" && port != "" {
				return net.JoinHostPort(host, port), nil
			}
		}
	}
	return "", fmt.Errorf("%w: not an address", errProtocol)
}
