//! Conversions of the slices of GPUs.

use millrace_types::{AskedSlices, Failure, GpuIndex, Permille, Reason, SliceId, Terms};

use crate::slices::SliceTerms;
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

fn invalid_spec(message: String) -> Failure {
    Failure::new(Reason::InvalidSpec, message)
}

pub(super) fn asked(wire: admin::AskedSlices) -> Result<AskedSlices, Failure> {
    Ok(AskedSlices { terms: slice_terms(wire.terms)?, min: wire.min.max(1) })
}

pub(super) fn asked_wire(asked: AskedSlices) -> admin::AskedSlices {
    admin::AskedSlices { terms: Some(slice_terms_wire(asked.terms)), min: asked.min }
}

/// Parses the slices of a function on a node.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the correction.
pub fn placed_slices(wire: &worker::PlacedSlices) -> Result<(Terms, Vec<(SliceId, GpuIndex)>), Failure> {
    let on = wire.on.iter().map(|slice| (SliceId(slice.id), GpuIndex(slice.gpu)));
    Ok((slice_terms(wire.terms)?, on.collect()))
}

/// Encodes the slices of a function on a node.
#[must_use]
pub fn placed_slices_wire(
    terms: Terms,
    on: impl IntoIterator<Item = (SliceId, GpuIndex)>,
) -> worker::PlacedSlices {
    let slice = |(id, gpu): (SliceId, GpuIndex)| worker::PlacedSlice { id: id.0, gpu: gpu.0 };
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
        let asked_slices = AskedSlices { terms: terms(), min: 3 };
        assert_eq!(asked(asked_wire(asked_slices)), Ok(asked_slices));
        let on = vec![(SliceId(7), GpuIndex(0)), (SliceId(9), GpuIndex(1))];
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
