package main

import (
	"errors"

	"github.com/spf13/cobra"

	"shaperd/control"
)

func bypassCommand(e env) *cobra.Command {
	var forTime span
	cmd := &cobra.Command{
		Use:   "bypass on|off",
		Short: "Turn all limits off at once, or on again",
		Long: `The kill switch: with "on" limits count what they would do, and hold nothing back,
until "off", or for the time of --for. What is blocked stays so. Status, top, metrics and the log show it. Reloads do
not end it, nor does a restart where "run" has --state.`,
		Example: `  shaperd bypass on --for 10m
  shaperd bypass off`,
		Annotations: asOrder,
		Args:        args("on|off"),
		ValidArgs:   []string{"on", "off"},
		RunE: func(cmd *cobra.Command, args []string) error {
			on := args[0] == "on"
			switch {
			case !on && args[0] != "off":
				return usageError{errors.New("bypass needs on or off")}
			case !on && forTime != 0:
				return usageError{errors.New("--for is for bypass on")}
			}
			c := e.daemon()
			was, err := c.Status(cmd.Context())
			if err != nil {
				return err
			}
			s, err := c.Bypass(cmd.Context(), control.SetBypass{On: on, For: forTime.seconds()})
			if err != nil {
				return err
			}
			return e.show(s, func(p *page) {
				switch {
				case s.Bypass != nil:
					p.line("%s", p.red(bypassText(s)))
				case was.Bypass == nil:
					p.line("Bypass was off already: limits do as the configuration says.")
				default:
					p.line("Bypass is off: limits do as the configuration says.")
				}
			})
		},
	}
	forFlag(cmd, &forTime, `until "bypass off"`)
	return cmd
}
