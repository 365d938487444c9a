//! The tenants and their caps.

use futures::stream::BoxStream;
use millrace_proto::admin::{ListTenantsRequest, SetTenantRequest, Tenant};
use millrace_proto::convert::quota_wire;
use millrace_types::{Quota, TenantName};
use prost_types::FieldMask;

use super::Admin;
use super::call::{admin_client, stamped};
use super::pages::{self, PAGE};
use crate::error::Error;

impl Admin {
    /// Sets all caps of a tenant at once. [`Quota::NONE`] removes all caps.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn set_tenant(&self, name: &TenantName, quota: &Quota) -> Result<Tenant, Error> {
        self.ask_to_set(self.setting(name, quota)).await
    }

    /// Makes every check of [`set_tenant`](Self::set_tenant) but stores nothing. Returns the tenant
    /// as it would be.
    ///
    /// # Errors
    /// The errors of `set_tenant`, and `MALFORMED_REQUEST` when the server is too old for a dry
    /// run. Such a server would ignore `dry_run` and store the caps. It refuses because the update
    /// mask names a field that it does not know.
    pub async fn try_tenant(&self, name: &TenantName, quota: &Quota) -> Result<Tenant, Error> {
        let update_mask = Some(FieldMask { paths: vec!["dry_run".to_owned()] });
        let setting = self.setting(name, quota);
        self.ask_to_set(SetTenantRequest { dry_run: true, update_mask, ..setting }).await
    }

    fn setting(&self, name: &TenantName, quota: &Quota) -> SetTenantRequest {
        SetTenantRequest {
            name: name.to_string(),
            quota: Some(quota_wire(quota)),
            idempotency_key: self.endpoints.next_id(),
            update_mask: None,
            dry_run: false,
        }
    }

    async fn ask_to_set(&self, request: SetTenantRequest) -> Result<Tenant, Error> {
        self.ask(request, async |mut client, request| client.set_tenant(request).await).await
    }

    /// Lists every tenant that has caps or functions, by name.
    pub fn tenants(&self) -> BoxStream<'static, Result<Tenant, Error>> {
        let request = ListTenantsRequest {
            page_size: PAGE,
            page_token: String::new(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = ListTenantsRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_tenants(stamped(request, left)).await })
        })
    }
}
