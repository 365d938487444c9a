//! Profiles: the measured speed of functions' models on parts of a GPU.

use futures::TryStreamExt as _;
use millrace_proto::admin::{ListProfilesRequest, Operation, Profile, ProfileFunctionRequest};
use millrace_types::{FunctionKey, FunctionName, TenantName};

use super::Admin;
use super::call::{admin_client, stamped};
use super::pages::{self, PAGE};
use crate::error::Error;

impl Admin {
    /// Begins to profile a function. With `grid`, every width is measured with every quota; otherwise as many widths
    /// as the curve needs.
    ///
    /// # Errors
    /// [`Error::Refused`] with `FUNCTION_NOT_FOUND`, or with `INVALID_SPEC` for a function that cannot be profiled
    /// or is being profiled.
    pub async fn profile_function(&self, function: &FunctionKey, grid: bool) -> Result<Operation, Error> {
        let request = ProfileFunctionRequest {
            tenant: function.tenant.to_string(),
            name: function.name.to_string(),
            grid,
            idempotency_key: self.endpoints.next_id(),
        };
        self.ask(request, async |mut client, request| client.profile_function(request).await).await
    }

    /// Returns the profiles of a tenant's functions or of all functions, or those of the functions with a name.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn profiles(
        &self,
        tenant: Option<&TenantName>,
        name: Option<&FunctionName>,
    ) -> Result<Vec<Profile>, Error> {
        let request = ListProfilesRequest {
            tenant: tenant.map(ToString::to_string).unwrap_or_default(),
            name: name.map(ToString::to_string).unwrap_or_default(),
            consistency: self.consistency.into(),
            page_size: PAGE,
            page_token: String::new(),
        };
        let profiles = pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = ListProfilesRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_profiles(stamped(request, left)).await })
        });
        profiles.try_collect().await
    }
}
