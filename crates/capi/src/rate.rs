//! Conversions of the static rate code of an address (IBTA vol. 1, 9.11 and the PathRecord's Rate field).

use std::ffi::c_int;

use crate::sys::*;

/// A rate code and its rates.
struct Rate {
    code: ibv_rate,
    /// Multiple of the base rate of 2.5 Gbit/s; None where rdma-core has none.
    multiple: Option<c_int>,
    /// Signalling rate [Mbit/s].
    mbps: c_int,
}

const fn rate(code: ibv_rate, multiple: c_int, mbps: c_int) -> Rate {
    Rate { code, multiple: Some(multiple), mbps }
}

const fn without_multiple(code: ibv_rate, mbps: c_int) -> Rate {
    Rate { code, multiple: None, mbps }
}

const RATES: [Rate; 23] = [
    rate(IBV_RATE_2_5_GBPS, 1, 2_500),
    rate(IBV_RATE_5_GBPS, 2, 5_000),
    rate(IBV_RATE_10_GBPS, 4, 10_000),
    rate(IBV_RATE_20_GBPS, 8, 20_000),
    rate(IBV_RATE_30_GBPS, 12, 30_000),
    rate(IBV_RATE_40_GBPS, 16, 40_000),
    rate(IBV_RATE_60_GBPS, 24, 60_000),
    rate(IBV_RATE_80_GBPS, 32, 80_000),
    rate(IBV_RATE_120_GBPS, 48, 120_000),
    without_multiple(IBV_RATE_14_GBPS, 14_062),
    without_multiple(IBV_RATE_56_GBPS, 56_250),
    without_multiple(IBV_RATE_112_GBPS, 112_500),
    without_multiple(IBV_RATE_168_GBPS, 168_750),
    without_multiple(IBV_RATE_25_GBPS, 25_781),
    without_multiple(IBV_RATE_100_GBPS, 103_125),
    without_multiple(IBV_RATE_200_GBPS, 206_250),
    without_multiple(IBV_RATE_300_GBPS, 309_375),
    rate(IBV_RATE_28_GBPS, 11, 28_125),
    rate(IBV_RATE_50_GBPS, 20, 53_125),
    rate(IBV_RATE_400_GBPS, 160, 425_000),
    rate(IBV_RATE_600_GBPS, 240, 637_500),
    rate(IBV_RATE_800_GBPS, 320, 850_000),
    rate(IBV_RATE_1200_GBPS, 480, 1_275_000),
];

/// The multiple of 2.5 Gbit/s, -1 for a code without one.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(rate: ibv_rate) -> c_int {
    RATES.iter().find(|known| known.code == rate).and_then(|known| known.multiple).unwrap_or(-1)
}

/// The code of a multiple of 2.5 Gbit/s, `IBV_RATE_MAX` for a multiple without one.
#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(mult: c_int) -> ibv_rate {
    RATES.iter().find(|known| known.multiple == Some(mult)).map_or(IBV_RATE_MAX, |known| known.code)
}

/// The rate in Mbit/s, -1 for an unknown code.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int {
    RATES.iter().find(|known| known.code == rate).map_or(-1, |known| known.mbps)
}

/// The code of a rate in Mbit/s, `IBV_RATE_MAX` for a rate without one.
#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate {
    RATES.iter().find(|known| known.mbps == mbps).map_or(IBV_RATE_MAX, |known| known.code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_way_to_mbps_and_back() {
        for code in IBV_RATE_2_5_GBPS..=IBV_RATE_1200_GBPS {
            assert_eq!(mbps_to_ibv_rate(ibv_rate_to_mbps(code)), code);
        }
    }

    #[test]
    fn codes_and_values_without_a_counterpart_are_told_apart() {
        assert_eq!(ibv_rate_to_mult(IBV_RATE_MAX), -1);
        assert_eq!(ibv_rate_to_mult(IBV_RATE_100_GBPS), -1);
        assert_eq!(ibv_rate_to_mbps(IBV_RATE_1200_GBPS + 1), -1);
        assert_eq!(mult_to_ibv_rate(3), IBV_RATE_MAX);
        assert_eq!(mbps_to_ibv_rate(0), IBV_RATE_MAX);
    }
}
