//! Model files: look-up and upload.

use std::collections::BTreeMap;

use millrace_proto::admin as api;
use millrace_proto::pages::PageBudget;
use millrace_types::{Digest, Failure};
use prost::Message as _;
use tonic::{Request, Streaming};

use super::{AdminService, caller, views};

/// Digests per look-up request.
const DIGESTS_MAX: usize = 1_000;

impl AdminService {
    pub(super) async fn find_artifacts(
        &self,
        request: api::FindArtifactsRequest,
    ) -> Result<api::FindArtifactsResponse, Failure> {
        if request.digests.len() > DIGESTS_MAX {
            return Err(Failure::malformed(format!(
                "the request has {} digests: at most {DIGESTS_MAX} are allowed",
                request.digests.len()
            )));
        }
        let digests = request.digests.iter().map(|text| text.parse()).collect::<Result<Vec<Digest>, _>>();
        let digests = digests.map_err(|error| Failure::malformed(error.to_string()))?;
        let found = self.artifacts.find(digests.clone()).await?;
        // A file removed since the look-up is left out.
        let state = self.replica.state();
        let known: BTreeMap<_, _> = found.into_iter().collect();
        let mut answer = api::FindArtifactsResponse::default();
        let mut room = PageBudget::default();
        for (place, digest) in digests.iter().enumerate() {
            let Some((bytes, artifact)) = known.get(digest).copied().zip(state.artifact(digest)) else {
                continue;
            };
            let found = views::artifact(*digest, bytes);
            let model = views::model(&artifact.model);
            if !room.take_bytes(found.encoded_len() + model.encoded_len()) {
                answer.not_looked_at = u32::try_from(digests.len() - place).unwrap_or(u32::MAX);
                break;
            }
            answer.found.push(found);
            answer.models.push(model);
        }
        Ok(answer)
    }

    pub(super) async fn upload_artifact(
        &self,
        request: Request<Streaming<api::UploadArtifactRequest>>,
    ) -> Result<api::UploadArtifactResponse, Failure> {
        let caller = caller(&request)?;
        let uploaded = self.artifacts.clone().upload(request.into_inner(), caller).await?;
        Ok(api::UploadArtifactResponse {
            artifact: Some(views::artifact(uploaded.digest, uploaded.bytes)),
            model: Some(views::model(&uploaded.model)),
        })
    }
}
