//! Tests of tenants and caps.

use millrace_proto::admin as api;
use millrace_types::Reason;

use crate::support::{Cluster, apply, mlp, reason, upload};

#[tokio::test]
async fn tenants_are_listed_with_their_caps_and_functions() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    apply(&mut admin, "f", &mlp()).await.unwrap();
    let quota = api::Quota { gpus_max: Some(2), gpu_share: Some(0.5), memory_share: None };
    let set = |name: &str, quota| api::SetTenantRequest {
        name: name.into(),
        quota: Some(quota),
        idempotency_key: format!("{name} {quota:?}"),
        update_mask: None,
        dry_run: false,
    };
    let tried = api::SetTenantRequest { dry_run: true, ..set("acme", quota) };
    let would_be = admin.set_tenant(tried).await.unwrap().into_inner();
    assert_eq!((would_be.quota, would_be.updated_by.as_str()), (Some(quota), "anonymous"));
    let all = admin.list_tenants(api::ListTenantsRequest::default()).await.unwrap().into_inner().tenants;
    let names: Vec<_> = all.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["default"], "a dry run stores nothing");
    // Clients name the dry run in the mask, so that a server without dry runs refuses the request. This
    // server refuses the path without a dry run.
    let update_mask = || Some(prost_types::FieldMask { paths: vec!["dry_run".into()] });
    let tried = api::SetTenantRequest { dry_run: true, update_mask: update_mask(), ..set("acme", quota) };
    assert_eq!(admin.set_tenant(tried).await.unwrap().into_inner().quota, Some(quota));
    let refused =
        admin.set_tenant(api::SetTenantRequest { update_mask: update_mask(), ..set("acme", quota) });
    assert_eq!(reason(&refused.await.unwrap_err()), Reason::MalformedRequest);
    let bad = api::Quota { gpus_max: Some(0), ..quota };
    let refused = admin.set_tenant(api::SetTenantRequest { dry_run: true, ..set("acme", bad) }).await;
    assert_eq!(reason(&refused.unwrap_err()), Reason::InvalidSpec);
    for _ in 0..2 {
        let tenant = admin.set_tenant(set("acme", quota)).await.unwrap().into_inner();
        assert_eq!(
            (tenant.quota, tenant.functions, tenant.updated_by.as_str()),
            (Some(quota), 0, "anonymous")
        );
    }
    let names = async |request: api::ListTenantsRequest| {
        let answer = cluster.admin().list_tenants(request).await.unwrap().into_inner();
        let tenants = answer.tenants.into_iter().map(|it| (it.name, it.functions, it.quota.unwrap()));
        (tenants.collect::<Vec<_>>(), answer.next_page_token)
    };
    let acme = ("acme".to_owned(), 0, quota);
    let default = ("default".to_owned(), 1, api::Quota::default());
    let whole = api::ListTenantsRequest::default();
    assert_eq!(names(whole.clone()).await, (vec![acme.clone(), default.clone()], String::new()));
    let first = api::ListTenantsRequest { page_size: 1, ..whole.clone() };
    assert_eq!(names(first.clone()).await, (vec![acme], "acme".to_owned()));
    let second = api::ListTenantsRequest { page_token: "acme".into(), ..first };
    assert_eq!(names(second).await, (vec![default.clone()], String::new()));
    for (name, bad) in [
        ("acme", api::Quota { gpus_max: Some(0), ..quota }),
        ("acme", api::Quota { memory_share: Some(2.0), ..quota }),
        ("No", quota),
    ] {
        assert_eq!(reason(&admin.set_tenant(set(name, bad)).await.unwrap_err()), Reason::InvalidSpec);
    }
    admin.set_tenant(set("acme", api::Quota::default())).await.unwrap();
    assert_eq!(names(whole).await.0, [default]);
}
