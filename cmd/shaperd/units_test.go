package main

import "testing"

func TestFormatFigures(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{rate(0), "0"},
		{rate(0.01), "0"},
		{rate(1.25e6), "10Mbit/s"},
		{rate(1234567), "9.88Mbit/s"},
		{rate(1e30), "8000000Tbit/s"},
		{size(uint64(0)), "0"},
		{size(999.6), "1kB"},
		{size(uint64(123456)), "123kB"},
		{size(uint64(1) << 63), "1000000TB"},
		{seconds(0), "0"},
		{seconds(1e-12), "1µs"},
		{seconds(0.0351), "35.1ms"},
		{seconds(59.96), "1m"},
		{seconds(7265), "2h1m"},
		{seconds(1e18), seconds(1e9)},
		{perSecond(0.001), "0"},
		{perSecond(0.05), "0.05/s"},
		{perSecond(12345), "12300/s"},
		{percent(0), "0%"},
		{percent(0.001), "<1%"},
		{percent(1), "100%"},
	} {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
}
