//! Checked conversions between wire types and domain types, in both directions.

mod policy;
mod sequences;
mod slices;
mod times;
mod tokens;

use std::num::NonZeroU32;

use millrace_types::function::{DEFAULT_PROCESSES, DEFAULT_REPLICAS, DEFAULT_TIMEOUT, UnknownRuntime};
use millrace_types::workflow::{Step, StepTarget, TensorSource, TensorSourceError, WorkflowOutput};
use millrace_types::{
    BatchingOptions, Bytes, DataId, Dim, Epoch, Failure, FunctionKey, FunctionName, FunctionSpec, NodeName,
    Priority, Quota, Reason, ResidencyOptions, ResourceRequest, ResourceShare, Runtime, SchedulingOptions,
    Slo, TenantName, TensorSpec, WorkflowSpec,
};

pub use self::policy::{policy_settings, policy_spec, policy_spec_wire};
pub use self::sequences::{in_sequence, in_sequence_wire, placed_sequences, placed_sequences_wire};
pub use self::slices::{
    placed_slices, placed_slices_wire, profile_point, profile_point_wire, slice_terms, slice_terms_wire,
    trial_setting,
};
pub use self::times::{duration, duration_wire, timestamp_wire};
pub use self::tokens::{sm_share, sm_share_wire};

use self::times::time;
use crate::{admin, worker};

/// Parses a function's key. An empty tenant means the default tenant.
///
/// # Errors
/// [`Reason::InvalidSpec`] if a name breaks the rules.
pub fn function_key(tenant: &str, name: &str) -> Result<FunctionKey, Failure> {
    let invalid =
        |error: millrace_types::ids::NameError| Failure::new(Reason::InvalidSpec, error.to_string());
    Ok(FunctionKey {
        tenant: if tenant.is_empty() {
            TenantName::default()
        } else {
            TenantName::new(tenant).map_err(invalid)?
        },
        name: FunctionName::new(name).map_err(invalid)?,
    })
}

/// Parses a function spec and checks every field.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the correction.
pub fn function_spec(wire: admin::FunctionSpec) -> Result<FunctionSpec, Failure> {
    let runtime = match wire.runtime.as_str() {
        "" => Runtime::default(),
        name => name.parse().map_err(|error: UnknownRuntime| invalid_spec(format!("runtime {error}")))?,
    };
    let memory = wire.resources.map_or(0, |resources| resources.gpu_memory_bytes);
    let spec = FunctionSpec {
        key: function_key(&wire.tenant, &wire.name)?,
        labels: wire.labels.into_iter().collect(),
        runtime,
        slo: wire.slo.map(slo).transpose()?,
        timeout: time("timeout", wire.timeout)?.unwrap_or(DEFAULT_TIMEOUT),
        resources: ResourceRequest { gpu_memory: (memory > 0).then_some(Bytes(memory)) },
        idempotent: wire.idempotent,
        replicas: if wire.replicas == 0 { DEFAULT_REPLICAS } else { wire.replicas },
        serving: serving(wire.priority, wire.residency, wire.batching)?,
        processes: if wire.processes == 0 { DEFAULT_PROCESSES } else { wire.processes },
        sequences: wire.sequences.map(sequences::of_spec).transpose()?,
        slices: wire.slices.map(slices::asked).transpose()?,
    };
    spec.validate().map_err(|error| invalid_spec(error.to_string()))?;
    Ok(spec)
}

/// Encodes a function spec.
#[must_use]
pub fn function_spec_wire(spec: &FunctionSpec) -> admin::FunctionSpec {
    admin::FunctionSpec {
        tenant: spec.key.tenant.to_string(),
        name: spec.key.name.to_string(),
        labels: spec.labels.clone().into_iter().collect(),
        runtime: spec.runtime.as_str().to_owned(),
        slo: spec.slo.map(slo_wire),
        timeout: Some(duration_wire(spec.timeout)),
        resources: spec
            .resources
            .gpu_memory
            .map(|memory| admin::Resources { gpu_memory_bytes: memory.get() }),
        idempotent: spec.idempotent,
        replicas: spec.replicas,
        priority: spec.serving.priority.get().into(),
        residency: (spec.serving.residency != ResidencyOptions::default()).then(|| admin::Residency {
            pin: spec.serving.residency.pin,
            min_warm: spec.serving.residency.min_warm,
            evict_after: spec.serving.residency.evict_after.map(duration_wire),
        }),
        batching: spec.serving.batching.map(|batching| admin::Batching {
            max_size: batching.max_size,
            max_wait: Some(duration_wire(batching.max_wait)),
        }),
        processes: spec.processes,
        sequences: spec.sequences.as_ref().map(sequences::spec_wire),
        slices: spec.slices.map(slices::asked_wire),
    }
}

/// Parses a workflow spec and checks everything that needs no functions.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the correction.
pub fn workflow_spec(wire: admin::WorkflowSpec) -> Result<WorkflowSpec, Failure> {
    let output =
        |output: admin::WorkflowOutput| Ok(WorkflowOutput { name: output.name, from: source(&output.from)? });
    let spec = WorkflowSpec {
        key: function_key(&wire.tenant, &wire.name)?,
        labels: wire.labels.into_iter().collect(),
        slo: wire.slo.map(slo).transpose()?,
        timeout: time("timeout", wire.timeout)?.unwrap_or(DEFAULT_TIMEOUT),
        inputs: wire.inputs,
        steps: wire.steps.into_iter().map(step).collect::<Result<_, Failure>>()?,
        outputs: wire.outputs.into_iter().map(output).collect::<Result<_, Failure>>()?,
    };
    spec.validate().map_err(|error| invalid_spec(error.to_string()))?;
    Ok(spec)
}

fn step(wire: admin::WorkflowStep) -> Result<Step, Failure> {
    use admin::workflow_step::Run as Wire;
    let name = |name: &str| FunctionName::new(name).map_err(|error| invalid_spec(error.to_string()));
    let run = match &wire.run {
        Some(Wire::Function(function)) => StepTarget::Function(name(function)?),
        Some(Wire::Workflow(workflow)) => StepTarget::Workflow(name(workflow)?),
        None => return Err(invalid_spec(format!("step {:?} runs nothing: name a function", wire.name))),
    };
    let given = |text: String| Some(text).filter(|text| !text.is_empty());
    let input = |(input, from): (String, String)| Ok((input, source(&from)?));
    Ok(Step {
        name: name(&wire.name)?,
        run,
        inputs: wire.inputs.into_iter().map(input).collect::<Result<_, Failure>>()?,
        each: given(wire.each),
        when: given(wire.when).map(|from| source(&from)).transpose()?,
        deadline: time("deadline", wire.deadline)?,
    })
}

fn source(text: &str) -> Result<TensorSource, Failure> {
    text.parse().map_err(|error: TensorSourceError| invalid_spec(error.to_string()))
}

/// Encodes a workflow spec.
#[must_use]
pub fn workflow_spec_wire(spec: &WorkflowSpec) -> admin::WorkflowSpec {
    use admin::workflow_step::Run as Wire;
    let step = |step: &Step| admin::WorkflowStep {
        name: step.name.to_string(),
        run: Some(match &step.run {
            StepTarget::Function(name) => Wire::Function(name.to_string()),
            StepTarget::Workflow(name) => Wire::Workflow(name.to_string()),
        }),
        inputs: step.inputs.iter().map(|(input, from)| (input.clone(), from.to_string())).collect(),
        each: step.each.clone().unwrap_or_default(),
        when: step.when.as_ref().map(ToString::to_string).unwrap_or_default(),
        deadline: step.deadline.map(duration_wire),
    };
    let output = |output: &WorkflowOutput| admin::WorkflowOutput {
        name: output.name.clone(),
        from: output.from.to_string(),
    };
    admin::WorkflowSpec {
        tenant: spec.key.tenant.to_string(),
        name: spec.key.name.to_string(),
        labels: spec.labels.clone().into_iter().collect(),
        slo: spec.slo.map(slo_wire),
        timeout: Some(duration_wire(spec.timeout)),
        inputs: spec.inputs.clone(),
        steps: spec.steps.iter().map(step).collect(),
        outputs: spec.outputs.iter().map(output).collect(),
    }
}

/// Parses the name of a piece of data.
///
/// # Errors
/// [`Reason::MalformedRequest`] if the name has no valid node.
pub fn data_id(wire: &worker::DataId) -> Result<DataId, Failure> {
    let home = NodeName::new(&wire.home).map_err(|error| Failure::malformed(error.to_string()))?;
    Ok(DataId { home, epoch: Epoch(wire.epoch), counter: wire.counter })
}

/// Encodes the name of a piece of data.
#[must_use]
pub fn data_id_wire(id: &DataId) -> worker::DataId {
    worker::DataId { home: id.home.to_string(), epoch: id.epoch.0, counter: id.counter }
}

/// Parses scheduling options. The spec's own validation checks the ranges.
fn serving(
    priority: u32,
    residency: Option<admin::Residency>,
    batching: Option<admin::Batching>,
) -> Result<SchedulingOptions, Failure> {
    let residency = residency.unwrap_or_default();
    let evict_after = time("residency.evict_after", residency.evict_after)?;
    let batching = match batching {
        None => None,
        Some(batching) => {
            let max_wait = time("batching.max_wait", batching.max_wait)?.unwrap_or_default();
            Some(BatchingOptions { max_size: batching.max_size, max_wait })
        }
    };
    Ok(SchedulingOptions {
        priority: self::priority(priority)?,
        residency: ResidencyOptions { pin: residency.pin, min_warm: residency.min_warm, evict_after },
        batching,
    })
}

/// Parses a priority; 0 means the default.
fn priority(level: u32) -> Result<Priority, Failure> {
    if level == 0 {
        return Ok(Priority::default());
    }
    let first = Priority::FIRST;
    let last = Priority::LAST;
    Priority::new(level.into())
        .ok_or_else(|| invalid_spec(format!("priority is {level}: write a number from {first} to {last}")))
}

/// Parses an objective. The spec's own validation checks the ranges.
fn slo(wire: admin::Slo) -> Result<Slo, Failure> {
    let deadline = time("slo.deadline", wire.deadline)?.unwrap_or_default();
    Ok(Slo { deadline, percentile: wire.percentile })
}

fn slo_wire(slo: Slo) -> admin::Slo {
    admin::Slo { deadline: Some(duration_wire(slo.deadline)), percentile: slo.percentile }
}

fn invalid_spec(message: String) -> Failure {
    Failure::new(Reason::InvalidSpec, message)
}

/// Encodes the scheduling options of a placed function.
pub fn serving_wire(serving: &SchedulingOptions, wire: &mut worker::DesiredFunction) {
    let SchedulingOptions { priority, residency, batching } = *serving;
    wire.priority = priority.get().into();
    wire.pin = residency.pin;
    wire.min_warm = residency.min_warm;
    wire.evict_after = residency.evict_after.map(duration_wire);
    wire.batch_max_size = batching.map_or(0, |batching| batching.max_size);
    wire.batch_max_wait = batching.map(|batching| duration_wire(batching.max_wait));
}

/// Parses the scheduling options of a placed function.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the fault.
pub fn placed_serving(wire: &worker::DesiredFunction) -> Result<SchedulingOptions, Failure> {
    let residency =
        admin::Residency { pin: wire.pin, min_warm: wire.min_warm, evict_after: wire.evict_after };
    let batching = (wire.batch_max_size > 0)
        .then_some(admin::Batching { max_size: wire.batch_max_size, max_wait: wire.batch_max_wait });
    serving(wire.priority, Some(residency), batching)
}

/// Parses a tenant's caps.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the correction.
pub fn quota(wire: &admin::Quota) -> Result<Quota, Failure> {
    let invalid = |message: String| Failure::new(Reason::InvalidSpec, message);
    let share = |field: &str, share: f64| {
        ResourceShare::from_fraction(share).map_err(|error| invalid(format!("{field}: {error}")))
    };
    let gpus = |max: u32| {
        let message =
            "gpus_max is 0: write a number from 1; to stop a tenant, delete or unload its functions";
        NonZeroU32::new(max).ok_or_else(|| invalid(message.to_owned()))
    };
    Ok(Quota {
        gpus_max: wire.gpus_max.map(gpus).transpose()?,
        gpu_share: wire.gpu_share.map(|it| share("gpu_share", it)).transpose()?,
        memory_share: wire.memory_share.map(|it| share("memory_share", it)).transpose()?,
    })
}

/// Encodes a tenant's caps for the admin API.
#[must_use]
pub fn quota_wire(quota: &Quota) -> admin::Quota {
    admin::Quota {
        gpus_max: quota.gpus_max.map(NonZeroU32::get),
        gpu_share: quota.gpu_share.map(ResourceShare::fraction),
        memory_share: quota.memory_share.map(ResourceShare::fraction),
    }
}

/// Encodes a declared tensor for the admin API. A free dimension becomes -1, with its name in
/// `free_dims`.
#[must_use]
pub fn tensor_spec_wire(spec: &TensorSpec) -> admin::TensorSpec {
    let free = |dim: &Dim| match dim {
        Dim::Symbol(name) => Some(name.clone()),
        Dim::Fixed(_) => None,
    };
    admin::TensorSpec {
        name: spec.name.clone(),
        datatype: spec.datatype.to_string(),
        shape: spec.shape.iter().map(Dim::wire).collect(),
        free_dims: spec.shape.iter().filter_map(free).collect(),
    }
}

/// Parses a declared tensor. A free dimension without a name gets a unique name.
///
/// # Errors
/// [`Reason::MalformedRequest`] for an unknown datatype, for a dimension of 0, and if only some of
/// the free dimensions have names.
pub fn tensor_spec(wire: admin::TensorSpec) -> Result<TensorSpec, Failure> {
    let admin::TensorSpec { name, datatype, shape, free_dims } = wire;
    let datatype =
        datatype.parse().map_err(|error| Failure::malformed(format!("tensor {name:?}: {error}")))?;
    let free = shape.iter().filter(|&&size| size < 0).count();
    if !free_dims.is_empty() && free_dims.len() != free {
        let named = free_dims.len();
        return Err(Failure::malformed(format!(
            "tensor {name:?} has {free} free dimensions and names {named}: name all of them or none"
        )));
    }
    let mut names = free_dims.into_iter();
    let mut dim = |(axis, &size): (usize, &i64)| match u64::try_from(size) {
        Ok(0) => Err(Failure::malformed(format!("tensor {name:?} has a dimension of 0: write sizes from 1"))),
        Ok(size) => Ok(Dim::Fixed(size)),
        Err(_) => Ok(Dim::Symbol(names.next().unwrap_or_else(|| format!("{name}.{axis}")))),
    };
    let shape = shape.iter().enumerate().map(&mut dim).collect::<Result<_, _>>()?;
    Ok(TensorSpec { name, datatype, shape })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::DataType;

    use super::*;

    fn spec() -> FunctionSpec {
        let key = function_key("", "digits").unwrap();
        let slo = Slo { deadline: Duration::from_millis(50), percentile: 0.98 };
        let resources = ResourceRequest { gpu_memory: Some(Bytes::mib(64)) };
        FunctionSpec { slo: Some(slo), resources, ..FunctionSpec::new(key) }
    }

    #[test]
    fn a_function_spec_survives_the_wire() {
        assert_eq!(function_spec(function_spec_wire(&spec())), Ok(spec()));
    }

    #[test]
    fn a_tensor_survives_the_wire_with_the_names_of_its_free_dimensions() {
        let shape = vec![Dim::Symbol("batch".into()), Dim::Fixed(3), Dim::Symbol("width".into())];
        let tensor = TensorSpec { name: "x".into(), datatype: DataType::Int64, shape };
        let wire = tensor_spec_wire(&tensor);
        assert_eq!((wire.shape.as_slice(), wire.free_dims.len()), ([-1, 3, -1].as_slice(), 2));
        assert_eq!(tensor_spec(wire.clone()), Ok(tensor));
        let unnamed = tensor_spec(admin::TensorSpec { free_dims: Vec::new(), ..wire.clone() }).unwrap();
        assert_ne!(unnamed.shape[0], unnamed.shape[2]);
        for (malformed, says) in [
            (admin::TensorSpec { free_dims: vec!["batch".into()], ..wire.clone() }, "names 1: name all"),
            (admin::TensorSpec { shape: vec![0], free_dims: Vec::new(), ..wire.clone() }, "dimension of 0"),
            (admin::TensorSpec { datatype: "COMPLEX".into(), ..wire }, "COMPLEX"),
        ] {
            let refused = tensor_spec(malformed).unwrap_err();
            assert_eq!(refused.reason, Reason::MalformedRequest);
            assert!(refused.message.contains(says), "{refused}");
        }
    }

    #[test]
    fn caps_survive_the_wire_and_invalid_caps_are_refused() {
        let half = admin::Quota { gpus_max: Some(3), gpu_share: Some(0.5), memory_share: Some(1.0) };
        assert_eq!(quota_wire(&quota(&half).unwrap()), half);
        assert_eq!(quota(&admin::Quota::default()), Ok(Quota::NONE));
        for (field, bad) in [
            ("gpus_max", admin::Quota { gpus_max: Some(0), ..half }),
            ("gpu_share", admin::Quota { gpu_share: Some(0.0), ..half }),
            ("gpu_share", admin::Quota { gpu_share: Some(f64::NAN), ..half }),
            ("memory_share", admin::Quota { memory_share: Some(1.01), ..half }),
            ("memory_share", admin::Quota { memory_share: Some(-0.5), ..half }),
        ] {
            let refused = quota(&bad).unwrap_err();
            assert!(
                refused.reason == Reason::InvalidSpec && refused.message.starts_with(field),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn specs_that_a_client_did_not_check_are_refused() {
        let mut wire = function_spec_wire(&spec());
        wire.slo.as_mut().unwrap().percentile = 1.0;
        assert_eq!(function_spec(wire).unwrap_err().reason, Reason::InvalidSpec);
        let negative = Some(prost_types::Duration { seconds: -1, nanos: 0 });
        let wire = admin::FunctionSpec { timeout: negative, ..function_spec_wire(&spec()) };
        assert!(function_spec(wire).unwrap_err().message.contains("negative"));
    }
}
