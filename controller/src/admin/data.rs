//! The location of a piece of intermediate data, by tier 2 of the index.

use millrace_cluster_state::DataLocation;
use millrace_proto::admin as api;
use millrace_types::{DataId, Epoch, Failure};

use super::{AdminService, node_name};

impl AdminService {
    pub(super) async fn lookup_data(
        &self,
        request: api::LookupDataRequest,
    ) -> Result<api::LookupDataResponse, Failure> {
        let consistency = request.consistency();
        let id = request
            .id
            .ok_or_else(|| Failure::malformed("the request names no data: give the id of the data"))?;
        let id = DataId { home: node_name(&id.home)?, epoch: Epoch(id.epoch), counter: id.counter };
        Ok(located(self.read(consistency).await?.locate(&id)))
    }
}

fn located(located: DataLocation) -> api::LookupDataResponse {
    match located {
        DataLocation::Held { home, holders, bytes } => api::LookupDataResponse {
            state: api::DataState::Held.into(),
            home: home.to_string(),
            holders: holders.iter().map(ToString::to_string).collect(),
            bytes: bytes.get(),
        },
        DataLocation::Lost { bytes } => api::LookupDataResponse {
            state: api::DataState::Lost.into(),
            bytes: bytes.get(),
            ..Default::default()
        },
        DataLocation::Unknown => api::LookupDataResponse::default(),
    }
}
