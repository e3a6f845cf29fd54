//go:build race

package shaper

func init() { raceDetector = true }
