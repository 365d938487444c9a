//! Trials of a profile (F04): requests of the worker's own, one after another, on a part of a GPU.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes as Data;
use millrace_proto::convert::{profile_point_wire, trial_setting};
use millrace_proto::worker as wire;
use millrace_slices::profiling::{Trial, TrialAnswer, TrialFault, TrialStep};
use millrace_types::profile::{ProfilePoint, TrialSetting};
use millrace_types::tensor::element_count;
use millrace_types::{Bytes, DataType, Dim, Failure, GpuIndex, Reason, RequestId, RevisionKey, TensorSpec};

use super::{WorkerService, revision_of};
use crate::handle::NodeHandle;
use crate::objects::{Contents, InputTensor};
use crate::request::{Attempt, OnGpus};
use crate::signature::{FunctionSignature, InputReader};
use crate::tensors;

/// The timeout of each request of a trial, and of the wait for the model in host memory.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The priority of the requests of a trial: the lowest.
const PRIORITY: u64 = 8;

impl WorkerService {
    pub(super) async fn trial(
        &self,
        asked: wire::RunTrialRequest,
    ) -> Result<wire::RunTrialResponse, Failure> {
        if self.draining.load(Ordering::Relaxed) {
            let message = "the worker is shutting down: profile on another worker";
            return Err(Failure::new(Reason::ShuttingDown, message));
        }
        let revision = revision_of(&asked.tenant, &asked.function, asked.revision)?;
        let setting = trial_setting(asked.sm_units, asked.quota_permille)?;
        let signature = self.signature(&revision)?;
        let id = RequestId::new(&asked.request_id)
            .ok_or_else(|| Failure::malformed("request_id must be 1 to 128 visible ASCII characters"))?;
        // The inputs are made after the permit is taken, so that only one trial has memory for inputs.
        let _only = self.trials.try_acquire().map_err(|_| {
            Failure::new(Reason::QueueFull, "another trial runs on this worker: try again soon")
        })?;
        let request = request(id, &revision, &signature, self.message_max)?;
        let _held = self.gate.enter(signature.digest, TIMEOUT).await?;
        let (gpu, point) = run_trial(&self.node, &request, setting).await?;
        Ok(wire::RunTrialResponse { gpu: gpu.0, point: Some(profile_point_wire(point)) })
    }
}

/// Runs the requests of a trial.
///
/// # Errors
/// The failure of a request; [`Reason::OperationState`] if the GPU is not shared, and
/// [`Reason::QueueFull`] if other requests took the GPU for too long.
pub async fn run_trial(
    node: &NodeHandle,
    request: &Attempt,
    setting: TrialSetting,
) -> Result<(GpuIndex, ProfilePoint), Failure> {
    let mut trial = Trial::new(node.now(), setting);
    let mut first_gpu = None;
    loop {
        let sent = node.now();
        let answer = node.invoke(Attempt { trial: Some(setting), counted: true, ..request.clone() }).await?;
        let gpu = answer.gpu.unwrap_or_default();
        // GPUs may be of different types.
        let same_gpu = *first_gpu.get_or_insert(gpu) == gpu;
        let now = node.now();
        let answer = TrialAnswer {
            took: now.since(sent),
            computed: answer.split.run,
            held: answer.split.token,
            units: answer.on.map(|on| on.sms.units()),
            alone: same_gpu && answer.on.is_some_and(|on| on.alone),
        };
        match trial.on_answer(now, answer) {
            TrialStep::Send { after } if after.is_zero() => {}
            TrialStep::Send { after } => node.pause(after).await,
            TrialStep::Done(point) => return Ok((gpu, point)),
            TrialStep::GiveUp(fault) => {
                let reason = match fault {
                    TrialFault::NotShared => Reason::OperationState,
                    TrialFault::Busy { .. } => Reason::QueueFull,
                };
                return Err(Failure::new(reason, fault.to_string()).after_execution());
            }
        }
    }
}

/// Returns the request that a trial repeats.
fn request(
    request_id: RequestId,
    revision: &RevisionKey,
    signature: &FunctionSignature,
    bytes_max: Bytes,
) -> Result<Attempt, Failure> {
    let refused = |message: String| Err(Failure::new(Reason::InvalidInput, message));
    if signature.reader == InputReader::Process {
        return refused(format!("{revision} is a program: only models have profiles"));
    }
    if signature.state.is_some() {
        return refused(format!("{revision} keeps state between requests: profile it without sequences"));
    }
    let inputs = signature.inputs.iter().map(|input| sample(input, bytes_max));
    let Some(inputs) = inputs.collect::<Option<Vec<_>>>() else {
        return refused(format!(
            "the inputs of {revision} have more than {bytes_max}: they cannot be profiled"
        ));
    };
    let packed = tensors::pack(inputs)?;
    Ok(Attempt {
        request_id,
        attempts_left: 1,
        revision: revision.clone(),
        timeout: TIMEOUT,
        objective: None,
        priority: PRIORITY,
        inputs: packed.tensors,
        descriptors: packed.descriptors,
        on_gpus: OnGpus::default(),
        outputs: Vec::new(),
        next: Vec::new(),
        cold: Duration::ZERO,
        behind: Duration::ZERO,
        counted: true,
        trial: None,
    })
}

/// Returns an input with valid values, and with a size of 1 in each free dimension; `None` if the input is too
/// large.
fn sample(input: &TensorSpec, bytes_max: Bytes) -> Option<InputTensor> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => i64::try_from(*size).ok(),
        Dim::Symbol(_) => Some(1),
    };
    let shape = input.shape.iter().map(size).collect::<Option<Vec<_>>>()?;
    let element = element(input.datatype);
    let bytes = element_count(&shape)?.checked_mul(element.len())?;
    if bytes as u64 > bytes_max.get() {
        return None;
    }
    let contents = Contents::Inline(Data::from(element.repeat(bytes / element.len())));
    Some(InputTensor { name: input.name.clone(), datatype: input.datatype.to_string(), shape, contents })
}

/// Returns the bytes of an element: a half, or a 1, which is valid as a token id and as a mask.
fn element(datatype: DataType) -> Vec<u8> {
    match datatype {
        DataType::Fp32 => 0.5_f32.to_le_bytes().to_vec(),
        DataType::Fp64 => 0.5_f64.to_le_bytes().to_vec(),
        DataType::Fp16 => 0x3800_u16.to_le_bytes().to_vec(),
        DataType::Bf16 => 0x3f00_u16.to_le_bytes().to_vec(),
        DataType::Bytes => [&1_u32.to_le_bytes()[..], b"a"].concat(),
        DataType::Bool
        | DataType::Int8
        | DataType::Uint8
        | DataType::Int16
        | DataType::Uint16
        | DataType::Int32
        | DataType::Uint32
        | DataType::Int64
        | DataType::Uint64 => {
            let mut one = vec![0; datatype.size().unwrap_or(1)];
            one[0] = 1;
            one
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_the_declared_types_and_the_least_shapes() {
        let spec = |datatype, shape| TensorSpec { name: "x".into(), datatype, shape };
        let free = || Dim::Symbol("n".into());
        let length = |spec: &TensorSpec| sample(spec, Bytes::mib(1)).map(|it| (it.shape, it.contents.len()));
        assert_eq!(length(&spec(DataType::Fp32, vec![free(), Dim::Fixed(3)])), Some((vec![1, 3], 12)));
        assert_eq!(length(&spec(DataType::Int64, vec![])), Some((vec![], 8)));
        assert_eq!(length(&spec(DataType::Bytes, vec![Dim::Fixed(2)])), Some((vec![2], 10)));
        assert_eq!(length(&spec(DataType::Fp32, vec![Dim::Fixed(1 << 40)])), None);
        assert_eq!(length(&spec(DataType::Fp32, vec![Dim::Fixed(u64::MAX), Dim::Fixed(2)])), None);
    }
}
