//! How fast a run computes on a share of a GPU's SMs.

use crate::GpuIndex;
use crate::slices::{Permille, SliceId, Terms};

/// The speed of a run by its share of the SMs: `r(s) = min(1, (s / n)^γ)`, where `n` is the share that saturates
/// the run. A run of `t` on the whole GPU lasts `t / r(s)`.
///
/// The form follows the profiles in FaST-GShare, section 5.2: the throughput of ResNet grows much from 6% to
/// 12% of the SMs, little from 12% to 24%, and not beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ComputeCurve {
    saturation: Permille,
    /// The exponent `γ` in thousandths.
    exponent: Permille,
}

impl ComputeCurve {
    /// A run that is as fast on any share of the SMs.
    pub const FLAT: Self = Self { saturation: Permille::ALL, exponent: Permille::ZERO };
    /// A run that is as fast as its share of the SMs is large: the assumption for a model that was not measured.
    pub const PROPORTIONAL: Self = Self { saturation: Permille::ALL, exponent: Permille::ALL };

    /// Returns the curve of a run that is fastest from `saturation` on, with the exponent `γ` below, rounded to
    /// thousandths.
    ///
    /// # Errors
    ///
    /// Fails unless the saturation is above 0 and the exponent is from 0 to 1.
    pub fn new(saturation: Permille, exponent: f64) -> Result<Self, CurveError> {
        if saturation == Permille::ZERO {
            return Err(CurveError::NoSaturation);
        }
        if !(0.0..=1.0).contains(&exponent) {
            return Err(CurveError::Exponent(exponent));
        }
        let exponent = Permille::new((exponent * 1000.0).round() as u16).unwrap_or(Permille::ALL);
        Ok(Self { saturation, exponent })
    }

    /// Returns the least share of the SMs on which the run is fastest.
    #[must_use]
    pub const fn saturation(&self) -> Permille {
        self.saturation
    }

    /// Returns the exponent `γ`, in thousandths.
    #[must_use]
    pub const fn exponent(&self) -> Permille {
        self.exponent
    }

    /// Returns the speed on a share of the SMs, from 0 to 1 of the speed on the whole GPU.
    #[must_use]
    pub fn rate(&self, sms: Permille) -> f64 {
        if sms >= self.saturation {
            return 1.0;
        }
        let exponent = f64::from(self.exponent.get()) / 1000.0;
        (f64::from(sms.get()) / f64::from(self.saturation.get())).powf(exponent)
    }
}

/// The compute of a slice: its limits, and the speed of its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SliceCompute {
    /// The limits of the slice.
    pub terms: Terms,
    /// The speed by the width of a token. A wider token is granted to the slice that gains the most.
    pub curve: ComputeCurve,
}

impl SliceCompute {
    /// Returns the compute of a slice of a model without a profile.
    #[must_use]
    pub const fn unmeasured(terms: Terms) -> Self {
        Self { terms, curve: ComputeCurve::PROPORTIONAL }
    }
}

/// A slice of a function on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceOnGpu {
    /// The slice.
    pub id: SliceId,
    /// The GPU of the slice.
    pub gpu: GpuIndex,
    /// The speed of the function's model on this type of GPU.
    pub curve: ComputeCurve,
}

impl SliceOnGpu {
    /// Returns a slice of a model without a profile.
    #[must_use]
    pub const fn unmeasured(id: SliceId, gpu: GpuIndex) -> Self {
        Self { id, gpu, curve: ComputeCurve::PROPORTIONAL }
    }
}

/// The fault of a refused [`ComputeCurve`].
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum CurveError {
    /// No share of the SMs saturates the run.
    #[error("the curve saturates at 0% of the SMs: write a share above 0%")]
    NoSaturation,
    /// The run would become slower with more SMs, or more than proportionally faster.
    #[error("the exponent of the curve is {0}: write a number from 0 to 1")]
    Exponent(f64),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(thousandths: u16) -> Permille {
        Permille::new(thousandths).unwrap()
    }

    #[test]
    fn resnet_at_an_eighth_of_the_sms_has_three_quarters_of_the_speed() {
        let resnet = ComputeCurve::new(share(240), 0.38).unwrap();
        assert!((resnet.rate(share(120)) - 0.768).abs() < 1e-3, "{}", resnet.rate(share(120)));
        assert_eq!(resnet.rate(share(240)), 1.0);
        assert_eq!(resnet.rate(Permille::ALL), 1.0);
    }

    #[test]
    fn more_sms_never_make_a_run_slower() {
        let curve = ComputeCurve::new(share(875), 0.72).unwrap();
        let rates: Vec<f64> = (1..=1000).map(|sms| curve.rate(share(sms))).collect();
        assert!(rates.is_sorted());
        assert_eq!(ComputeCurve::FLAT.rate(share(1)), 1.0);
    }

    #[test]
    fn curves_outside_their_bounds_are_refused_with_advice() {
        for (refused, advice) in [
            (ComputeCurve::new(Permille::ZERO, 0.5), "above 0%"),
            (ComputeCurve::new(Permille::ALL, -0.1), "from 0 to 1"),
            (ComputeCurve::new(Permille::ALL, f64::NAN), "from 0 to 1"),
        ] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(advice), "{message}");
        }
    }
}
