//! The neurons' equations.

use crate::network::UNITS_PER_MV;

/// Potential at which a neuron has fired (mV).
pub(crate) const THRESHOLD: f64 = 30.0;
/// Potential after a spike (mV).
pub(crate) const RESET: f64 = -65.0;
/// Sensitivity of the recovery to the potential.
pub(crate) const B: f64 = 0.2;

/// Recovery rate, and its increase after a spike: regular spiking and fast spiking neurons.
pub(crate) const EXCITATORY: (f64, f64) = (0.02, 8.0);
/// See [`EXCITATORY`].
pub(crate) const INHIBITORY: (f64, f64) = (0.1, 2.0);

/// Advances neurons of one kind by 1 ms, and clears their currents.
pub(crate) fn advance(v: &mut [f64], u: &mut [f64], currents: &mut [i64], recovery_rate: f64) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
        // SAFETY: the processor has the instructions.
        return unsafe { advance_avx512(v, u, currents, recovery_rate) };
    }
    advance_portable(v, u, currents, recovery_rate);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn advance_avx512(v: &mut [f64], u: &mut [f64], currents: &mut [i64], recovery_rate: f64) {
    advance_portable(v, u, currents, recovery_rate);
}

/// No operations are fused, so all processors compute the same bits.
#[inline(always)]
fn advance_portable(v: &mut [f64], u: &mut [f64], currents: &mut [i64], recovery_rate: f64) {
    const MV: f64 = 1.0 / UNITS_PER_MV as f64;
    for ((v, u), current) in v.iter_mut().zip(u).zip(currents) {
        let input = *current as f64 * MV;
        *v += 0.5 * ((0.04 * *v + 5.0) * *v + 140.0 - *u + input);
        *v += 0.5 * ((0.04 * *v + 5.0) * *v + 140.0 - *u + input);
        *u += recovery_rate * (B * *v - *u);
        *current = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_and_scalars_agree_in_every_bit() {
        let v: Vec<f64> = (0..1003).map(|i| f64::from(i) * 0.11 - 80.0).collect();
        let u: Vec<f64> = (0..1003).map(|i| f64::from(i % 37) - 18.0).collect();
        let currents: Vec<i64> = (0..1003).map(|i| (i - 500) * 12_345).collect();
        let run = |advance: fn(&mut [f64], &mut [f64], &mut [i64], f64)| {
            let (mut v, mut u, mut currents) = (v.clone(), u.clone(), currents.clone());
            advance(&mut v, &mut u, &mut currents, 0.02);
            (v, u, currents)
        };
        let advanced = run(advance);
        assert_eq!(advanced, run(advance_portable));
        assert!(advanced.2.iter().all(|&current| current == 0));
    }
}
