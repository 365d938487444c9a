//! Model files: which there are, and new ones.

use millrace_proto::admin as api;
use millrace_types::Failure;
use tonic::{Request, Streaming};

use super::{AdminService, caller, views};

/// Digests asked after at a time.
const DIGESTS_MAX: usize = 1_000;

impl AdminService {
    pub(super) async fn find_artifacts(
        &self,
        request: api::FindArtifactsRequest,
    ) -> Result<api::FindArtifactsResponse, Failure> {
        if request.digests.len() > DIGESTS_MAX {
            return Err(Failure::malformed(format!(
                "{} digests: ask after {DIGESTS_MAX} at a time",
                request.digests.len()
            )));
        }
        let digests = request.digests.iter().map(|text| text.parse()).collect::<Result<_, _>>();
        let digests = digests
            .map_err(|error: millrace_types::digest::ParseError| Failure::malformed(error.to_string()))?;
        let found = self.artifacts.find(digests).await?;
        // One that was removed since is not found.
        let state = self.replica.state();
        let known = found.into_iter().filter_map(|(digest, bytes)| {
            let model = views::model(&state.artifact(&digest)?.model);
            Some((views::artifact(digest, bytes), model))
        });
        let (found, models) = known.unzip();
        Ok(api::FindArtifactsResponse { found, models })
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
