//! Fault injection into a worker's executors, for tests, if the operator allows it.

use millrace_proto::executor::Fault;
use millrace_proto::{convert, worker as wire};
use millrace_types::{Failure, GpuIndex, Reason, Revision, RevisionKey};

use crate::faults::{FaultError, InjectedFaults};

use super::WorkerService;

impl WorkerService {
    pub(super) async fn inject(&self, request: wire::InjectFaultRequest) -> Result<(), Failure> {
        if self.faults == InjectedFaults::Refuse {
            let message = "faults are not allowed here: start the worker with --allow faults";
            return Err(Failure::new(Reason::PermissionDenied, message));
        }
        let fault = i32::try_from(request.fault).ok().and_then(|number| Fault::try_from(number).ok());
        let fault = fault.filter(|fault| *fault != Fault::Unspecified);
        let fault = fault.ok_or_else(|| Failure::malformed(format!("fault {} is unknown", request.fault)))?;
        let function = match request.function.as_str() {
            "" => None,
            text => Some(parse_revision(text).ok_or_else(|| {
                Failure::malformed(format!("{text:?} is not a function revision: write tenant/name@revision"))
            })?),
        };
        tracing::warn!(gpu = request.gpu, ?fault, function = request.function, "injecting a fault");
        self.node.inject_fault(GpuIndex(request.gpu), fault, function).await.map_err(|error| match &error {
            FaultError::NodeGone => Failure::new(Reason::ShuttingDown, error.to_string()),
            FaultError::NoSuchGpu(_) => Failure::malformed(error.to_string()),
            FaultError::NoSuchFunction(_) => Failure::new(Reason::FunctionNotFound, error.to_string()),
        })
    }
}

fn parse_revision(text: &str) -> Option<RevisionKey> {
    let (function, revision) = text.rsplit_once('@')?;
    let (tenant, name) = function.split_once('/')?;
    let function = convert::function_key(tenant, name).ok()?;
    Some(RevisionKey { function, revision: Revision::new(revision.parse().ok()?)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_revision_parses_to_itself() {
        for text in ["default/digits@3", "team.a/resnet-50@1"] {
            assert_eq!(parse_revision(text).unwrap().to_string(), text);
        }
        for bad in
            ["", "digits", "default/digits", "default/digits@0", "default/digits@x", "default@1", "a/B@1"]
        {
            assert_eq!(parse_revision(bad), None, "{bad}");
        }
    }
}
