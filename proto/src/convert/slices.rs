//! Conversions of the slices of GPUs.

use std::time::Duration;

use millrace_types::profile::{PROFILE_QUOTAS, PROFILE_WIDTHS, ProfilePoint, TrialSetting};
use millrace_types::{
    AskedSlices, ComputeCurve, Failure, GpuIndex, Permille, Reason, SliceId, SliceOnGpu, Terms,
};

use crate::slices::{ProfilePoint as ProfilePointWire, SliceTerms};
use crate::{admin, worker};

/// Parses the terms of a slice.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the correction.
pub fn slice_terms(wire: Option<SliceTerms>) -> Result<Terms, Failure> {
    let wire = wire.ok_or_else(|| invalid_spec("the slices have no terms".into()))?;
    let share = |thousandths: u32| {
        let share = u16::try_from(thousandths).ok().and_then(Permille::new);
        share.ok_or_else(|| invalid_spec(format!("{thousandths} thousandths are more than the whole")))
    };
    let terms = Terms::new(
        share(wire.sm_least_permille)?,
        share(wire.sm_most_permille)?,
        share(wire.quota_request_permille)?,
        share(wire.quota_limit_permille)?,
    );
    terms.map_err(|error| invalid_spec(error.to_string()))
}

/// Encodes the terms of a slice.
#[must_use]
pub fn slice_terms_wire(terms: Terms) -> SliceTerms {
    SliceTerms {
        sm_least_permille: terms.least().get().into(),
        sm_most_permille: terms.most().get().into(),
        quota_request_permille: terms.request().get().into(),
        quota_limit_permille: terms.limit().get().into(),
    }
}

/// Parses the setting of a trial.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the known settings.
pub fn trial_setting(units: u32, quota: u32) -> Result<TrialSetting, Failure> {
    let quota_share = u16::try_from(quota).ok().and_then(Permille::new);
    let setting = quota_share.and_then(|quota| TrialSetting::new(u8::try_from(units).ok()?, quota));
    setting.ok_or_else(|| {
        invalid_spec(format!(
            "no trial runs on {units} SM units for {quota} thousandths of the time: choose from {PROFILE_WIDTHS:?} and {PROFILE_QUOTAS:?}"
        ))
    })
}

/// Parses the result of a trial.
///
/// # Errors
/// [`Reason::InvalidSpec`] if no trial has the setting.
pub fn profile_point(wire: ProfilePointWire) -> Result<ProfilePoint, Failure> {
    let setting = trial_setting(wire.sm_units, wire.quota_permille)?;
    Ok(ProfilePoint {
        runs: wire.runs,
        p50: Duration::from_nanos(wire.p50_ns),
        p99: Duration::from_nanos(wire.p99_ns),
        elapsed: Duration::from_nanos(wire.elapsed_ns),
        computed: Duration::from_nanos(wire.computed_ns),
        ..ProfilePoint::new(setting)
    })
}

/// Encodes the result of a trial.
#[must_use]
pub fn profile_point_wire(point: ProfilePoint) -> ProfilePointWire {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    ProfilePointWire {
        sm_units: point.setting.units().into(),
        quota_permille: point.setting.quota().get().into(),
        runs: point.runs,
        p50_ns: nanos(point.p50),
        p99_ns: nanos(point.p99),
        elapsed_ns: nanos(point.elapsed),
        computed_ns: nanos(point.computed),
    }
}

fn invalid_spec(message: String) -> Failure {
    Failure::new(Reason::InvalidSpec, message)
}

pub(super) fn asked(wire: admin::AskedSlices) -> Result<AskedSlices, Failure> {
    let max = Some(wire.max).filter(|&max| max > 0);
    Ok(AskedSlices { terms: slice_terms(wire.terms)?, min: wire.min.max(1), max })
}

pub(super) fn asked_wire(asked: AskedSlices) -> admin::AskedSlices {
    admin::AskedSlices {
        terms: Some(slice_terms_wire(asked.terms)),
        min: asked.min,
        max: asked.max.unwrap_or_default(),
    }
}

/// Parses the slices of a function on a node.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the correction.
pub fn placed_slices(wire: &worker::PlacedSlices) -> Result<(Terms, Vec<SliceOnGpu>), Failure> {
    let slice = |slice: &worker::PlacedSlice| {
        let curve = slice.curve.as_ref().map(compute_curve).transpose()?;
        let curve = curve.unwrap_or(ComputeCurve::PROPORTIONAL);
        Ok(SliceOnGpu { id: SliceId(slice.id), gpu: GpuIndex(slice.gpu), curve })
    };
    Ok((slice_terms(wire.terms)?, wire.on.iter().map(slice).collect::<Result<_, Failure>>()?))
}

fn compute_curve(wire: &worker::ComputeCurve) -> Result<ComputeCurve, Failure> {
    let invalid = |message: String| Failure::new(Reason::InvalidSpec, message);
    let saturation = u16::try_from(wire.saturation_permille).ok().and_then(Permille::new);
    let saturation = saturation.ok_or_else(|| invalid("a curve saturates at more than all SMs".into()))?;
    let exponent = f64::from(wire.exponent_permille) / 1000.0;
    ComputeCurve::new(saturation, exponent).map_err(|error| invalid(error.to_string()))
}

/// Encodes the slices of a function on a node.
#[must_use]
pub fn placed_slices_wire(terms: Terms, on: impl IntoIterator<Item = SliceOnGpu>) -> worker::PlacedSlices {
    let slice = |SliceOnGpu { id, gpu, curve }: SliceOnGpu| worker::PlacedSlice {
        id: id.0,
        gpu: gpu.0,
        curve: (curve != ComputeCurve::PROPORTIONAL).then(|| worker::ComputeCurve {
            saturation_permille: curve.saturation().get().into(),
            exponent_permille: curve.exponent().get().into(),
        }),
    };
    worker::PlacedSlices { terms: Some(slice_terms_wire(terms)), on: on.into_iter().map(slice).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms() -> Terms {
        let share = |thousandths| Permille::new(thousandths).unwrap();
        Terms::new(share(120), share(500), share(300), share(800)).unwrap()
    }

    #[test]
    fn slices_survive_the_wire() {
        assert_eq!(slice_terms(Some(slice_terms_wire(terms()))), Ok(terms()));
        for max in [None, Some(8)] {
            let asked_slices = AskedSlices { terms: terms(), min: 3, max };
            assert_eq!(asked(asked_wire(asked_slices)), Ok(asked_slices));
        }
        let measured = ComputeCurve::new(Permille::new(240).unwrap(), 0.38).unwrap();
        let on = vec![
            SliceOnGpu { id: SliceId(7), gpu: GpuIndex(0), curve: ComputeCurve::PROPORTIONAL },
            SliceOnGpu { id: SliceId(9), gpu: GpuIndex(1), curve: measured },
        ];
        assert_eq!(placed_slices(&placed_slices_wire(terms(), on.clone())), Ok((terms(), on)));
    }

    #[test]
    fn terms_that_no_gpu_can_keep_are_refused() {
        let refused = |change: fn(&mut SliceTerms)| {
            let mut wire = slice_terms_wire(terms());
            change(&mut wire);
            slice_terms(Some(wire)).unwrap_err().message
        };
        assert!(refused(|it| it.quota_limit_permille = 1001).contains("more than the whole"));
        assert!(refused(|it| it.sm_least_permille = 70_000).contains("more than the whole"));
        assert!(refused(|it| it.quota_request_permille = 900).contains("above the quota limit"));
        assert!(refused(|it| it.sm_least_permille = 0).contains("SM partition"));
        assert!(slice_terms(None).is_err());
    }
}
