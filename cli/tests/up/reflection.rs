//! Every method of the admin API, called by a client that knows only the server's reflection, as
//! `grpcurl` does.

use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use millrace_proto::status::from_status;
use millrace_types::{Digest, Reason};
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, ServiceDescriptor};
use prost_types::FileDescriptorProto;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::running::{RunningCluster, eventually, repository};

const ADMIN: &str = "millrace.admin.v1.Admin";
const MODEL: &str = "examples/digits/digits.onnx";
const IMAGE: &str = "examples/digits/images/digit-3.png";

/// A codec of messages that are known only by their descriptors.
struct Dynamic(MessageDescriptor);

impl Codec for Dynamic {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self(self.0.clone())
    }

    fn decoder(&mut self) -> Self {
        Self(self.0.clone())
    }
}

impl Encoder for Dynamic {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, item: DynamicMessage, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(into).map_err(|error| Status::internal(error.to_string()))
    }
}

impl Decoder for Dynamic {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let decoded = DynamicMessage::decode(self.0.clone(), from);
        decoded.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// A generic client, which records the methods that it has called.
struct ReflectionClient {
    runtime: Runtime,
    channel: Channel,
    service: ServiceDescriptor,
    called: RefCell<BTreeSet<String>>,
}

/// Fetches a file descriptor by the file's name, or by a symbol in the file.
async fn file(client: &mut ServerReflectionClient<Channel>, question: MessageRequest) -> FileDescriptorProto {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let answers = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap();
    match answer.message_response.unwrap() {
        MessageResponse::FileDescriptorResponse(files) => {
            FileDescriptorProto::decode(files.file_descriptor_proto[0].as_slice()).unwrap()
        }
        other => panic!("{other:?}"),
    }
}

impl ReflectionClient {
    fn new(address: &str) -> Self {
        let runtime = Runtime::new().unwrap();
        let (channel, service) = runtime.block_on(async {
            let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
            let mut client = ServerReflectionClient::new(channel.clone());
            let first = file(&mut client, MessageRequest::FileContainingSymbol(ADMIN.into())).await;
            let mut files = BTreeMap::new();
            let mut names = first.dependency.clone();
            files.insert(first.name().to_owned(), first);
            while let Some(name) = names.pop() {
                if let Entry::Vacant(place) = files.entry(name) {
                    let name = place.key().clone();
                    let next = file(&mut client, MessageRequest::FileByFilename(name)).await;
                    names.extend(next.dependency.iter().cloned());
                    place.insert(next);
                }
            }
            let mut pool = DescriptorPool::new();
            pool.add_file_descriptor_protos(files.into_values()).unwrap();
            (channel, pool.get_service_by_name(ADMIN).unwrap())
        });
        Self { runtime, channel, service, called: RefCell::default() }
    }

    /// Calls a method with the messages of a stream, which may be a single message.
    fn send(
        &self,
        method: &str,
        messages: impl FnOnce(MessageDescriptor) -> Vec<DynamicMessage>,
    ) -> Result<Value, Status> {
        let method = self.service.methods().find(|it| it.name() == method).expect("the service has it");
        self.called.borrow_mut().insert(method.name().to_owned());
        let path = format!("/{ADMIN}/{}", method.name()).parse().unwrap();
        let messages = Request::new(tokio_stream::iter(messages(method.input())));
        let answer = self.runtime.block_on(async {
            let mut client = Grpc::new(self.channel.clone());
            client.ready().await.unwrap();
            client.client_streaming(messages, path, Dynamic(method.output())).await
        });
        answer.map(|answer| serde_json::to_value(answer.get_ref()).unwrap())
    }

    fn call(&self, method: &str, request: Value) -> Result<Value, Status> {
        self.send(method, |of| vec![DynamicMessage::deserialize(of, request).unwrap()])
    }

    fn ok(&self, method: &str, request: Value) -> Value {
        self.call(method, request.clone()).unwrap_or_else(|status| panic!("{method} {request}: {status:?}"))
    }

    /// Returns the reason for which a call is refused.
    fn refused(&self, method: &str, request: Value) -> Reason {
        let answer = self.call(method, request.clone());
        from_status(&answer.map(|answer| panic!("{method} {request}: {answer}")).unwrap_err()).reason
    }
}

/// Returns the messages of an artifact's upload: the header, then the bytes in pieces.
fn upload(of: &MessageDescriptor, model: &[u8]) -> Vec<DynamicMessage> {
    let header = json!({ "header": { "digest": Digest::of(model).to_string(), "bytes": model.len() } });
    let header = DynamicMessage::deserialize(of.clone(), header).unwrap();
    let pieces = model.chunks(20_000).map(|piece| {
        let mut message = DynamicMessage::new(of.clone());
        message.set_field_by_name("data", prost_reflect::Value::Bytes(piece.to_vec().into()));
        message
    });
    std::iter::once(header).chain(pieces).collect()
}

#[test]
fn every_admin_method_can_be_called_by_reflection_alone() {
    let up = RunningCluster::ephemeral(&["--allow", "faults", "--keep-spans", "1000"]);
    let admin = ReflectionClient::new(&up.client);
    functions(&admin, &up);
    workflows(&admin);
    cluster(&admin);
    nodes(&admin);
    policies(&admin);
    operations(&admin);
    masks(&admin);
    seen(&admin, &up);
    logged(&admin);

    let gone = json!({ "tenant": "default", "name": "digits" });
    assert_eq!(
        admin.refused(
            "DeleteFunction",
            json!({ "tenant": "default", "name": "digits", "resourceVersion": 999 })
        ),
        Reason::Conflict
    );
    admin.ok("DeleteFunction", gone.clone());
    assert_eq!(admin.refused("GetFunction", gone), Reason::FunctionNotFound);

    let there_are: BTreeSet<_> = admin.service.methods().map(|it| it.name().to_owned()).collect();
    assert_eq!(*admin.called.borrow(), there_are, "every method is called in this test");
}

/// Tests a function, from the upload of its model to a request.
fn functions(admin: &ReflectionClient, up: &RunningCluster) {
    let model = std::fs::read(repository(MODEL)).unwrap();
    let digest = Digest::of(&model).to_string();
    assert_eq!(admin.ok("FindArtifacts", json!({ "digests": [digest] })), json!({}));
    let uploaded = admin.send("UploadArtifact", |of| upload(&of, &model)).unwrap();
    assert_eq!(uploaded["artifact"]["digest"], digest);
    assert_eq!(admin.ok("FindArtifacts", json!({ "digests": [digest] }))["found"][0]["digest"], digest);

    let apply = |priority: u32, more: &Value| {
        let mut request = json!({
            "spec": { "tenant": "default", "name": "digits", "runtime": "onnx", "timeout": "60s",
                      "idempotent": true, "priority": priority },
            "digest": digest,
        });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    let outcome = |request| admin.ok("ApplyFunction", request)["outcome"].as_str().unwrap().to_owned();
    assert_eq!(outcome(apply(4, &json!({ "dryRun": true }))), "APPLY_OUTCOME_CREATED");
    let name = json!({ "tenant": "default", "name": "digits" });
    assert_eq!(
        admin.refused("GetFunction", name.clone()),
        Reason::FunctionNotFound,
        "a dry run stores nothing"
    );
    assert_eq!(outcome(apply(4, &json!({}))), "APPLY_OUTCOME_CREATED");
    assert_eq!(outcome(apply(4, &json!({}))), "APPLY_OUTCOME_UNCHANGED");
    let stale = apply(5, &json!({ "resourceVersion": 999 }));
    assert_eq!(admin.refused("ApplyFunction", stale), Reason::Conflict);
    eventually("the function is ready", || {
        let function = admin.ok("GetFunction", name.clone());
        let ready =
            function["conditions"].as_array().unwrap().iter().find(|it| it["type"] == "Ready").cloned();
        ready.is_some_and(|it| it["status"] == "CONDITION_STATUS_TRUE")
    });
    let listed = admin.ok("ListFunctions", json!({ "pageSize": 1, "consistency": "CONSISTENCY_STALE" }));
    assert_eq!(listed["functions"][0]["spec"]["name"], "digits");
    up.ok(&["invoke", "digits", "--image", &repository(IMAGE), "--request-id", "mine"]);
}

/// Tests a workflow of the function, from its apply to its deletion.
fn workflows(admin: &ReflectionClient) {
    let apply = |more: &Value| {
        let step = json!({ "name": "read", "function": "digits", "inputs": { "image": "input.picture" } });
        let output = json!({ "name": "scores", "from": "read.probabilities" });
        let mut request = json!({
            "spec": { "tenant": "default", "name": "reader", "timeout": "60s",
                      "inputs": ["picture"], "steps": [step], "outputs": [output] },
        });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    let outcome = |more| admin.ok("ApplyWorkflow", apply(&more))["outcome"].as_str().unwrap().to_owned();
    assert_eq!(outcome(json!({ "dryRun": true })), "APPLY_OUTCOME_CREATED");
    let item = json!({ "workflow": apply(&json!({}))["spec"] });
    let steps = admin.ok("DryRunApply", json!({ "items": [item] }))["steps"].clone();
    // JSON omits a position of 0.
    assert_eq!(steps, json!([{ "outcome": "APPLY_OUTCOME_CREATED" }]));
    let name = json!({ "tenant": "default", "name": "reader" });
    assert_eq!(
        admin.refused("GetWorkflow", name.clone()),
        Reason::WorkflowNotFound,
        "a dry run stores nothing"
    );
    assert_eq!(outcome(json!({})), "APPLY_OUTCOME_CREATED");
    assert_eq!(outcome(json!({})), "APPLY_OUTCOME_UNCHANGED");
    let workflow = admin.ok("GetWorkflow", name.clone());
    assert_eq!(workflow["inputs"][0]["shape"], json!(["-1", "1", "8", "8"]));
    assert_eq!(
        workflow["conditions"][0]["status"], "CONDITION_STATUS_TRUE",
        "the workflow is ready like its function"
    );
    let listed = admin.ok("ListWorkflows", json!({ "pageSize": 1, "consistency": "CONSISTENCY_STALE" }));
    assert_eq!(listed["workflows"][0]["spec"]["name"], "reader");
    let function = json!({ "tenant": "default", "name": "digits" });
    assert_eq!(admin.refused("DeleteFunction", function), Reason::InUse);
    admin.ok("DeleteWorkflow", name.clone());
    assert_eq!(admin.refused("DeleteWorkflow", name), Reason::WorkflowNotFound);
}

fn cluster(admin: &ReflectionClient) {
    let version = admin.ok("GetVersion", json!({}));
    assert_eq!(version["apiVersions"], json!(["millrace/v1"]));
    let status = admin.ok("GetClusterStatus", json!({}));
    assert_eq!((&status["leader"], &status["quorum"]), (&json!("1"), &json!(true)));
    assert_eq!(admin.refused("PromoteController", json!({ "id": 9 })), Reason::MembershipRefused);
    assert_eq!(admin.refused("RemoveController", json!({ "id": 1 })), Reason::MembershipRefused);
    assert_eq!(
        admin.ok("TransferLeadership", json!({ "id": 1 }))["leader"],
        "1",
        "the leader stays the same"
    );
}

fn nodes(admin: &ReflectionClient) {
    assert_eq!(admin.ok("ListSlices", json!({})), json!({}), "no function asks for slices");
    let nodes = admin.ok("ListNodes", json!({}));
    let name = nodes["nodes"][0]["name"].as_str().unwrap();
    assert_eq!(nodes["nodes"][0]["gpus"][0]["health"], "Up");
    let schedule = |how: &str| {
        let node = admin.ok("SetNodeScheduling", json!({ "name": name, "scheduling": how }));
        assert_eq!(node["scheduling"], how);
    };
    schedule("NODE_SCHEDULING_CORDONED");
    schedule("NODE_SCHEDULING_SCHEDULABLE");
    assert_eq!(admin.refused("RemoveNode", json!({ "name": name })), Reason::NodeState, "the node is live");
    let fault = json!({ "node": name, "fault": "FAULT_FAIL_NEXT_COPY" });
    assert_eq!(admin.ok("InjectFault", fault), json!({}));
    // The planner runs periodically, so its last plan may date from when the node was cordoned.
    eventually("the planner counts the node again", || {
        let signal = admin.ok("GetScalingSignal", json!({}));
        (&signal["nodesNow"], &signal["nodesNeeded"]) == (&json!(1), &json!(1))
    });
    let data = json!({ "id": { "home": name, "epoch": 1, "counter": 1 } });
    assert_eq!(admin.ok("LookupData", data), json!({}), "no process knows the data");
    let set = admin.ok("SetTenant", json!({ "name": "acme", "quota": { "gpusMax": 1 } }));
    assert_eq!(set["quota"]["gpusMax"], 1);
    let tenants = admin.ok("ListTenants", json!({}));
    let names: Vec<_> = tenants["tenants"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["acme", "default"]);
}

/// Tests the policy, from a first dry run back to the default.
fn policies(admin: &ReflectionClient) {
    let policy = admin.ok("GetPolicy", json!({}));
    let dispatch = &policy["nodes"][0]["actual"]["dispatch"];
    let resource_version = &policy["resourceVersion"];
    assert_eq!((dispatch, resource_version), (&json!("unified"), &Value::Null), "the default preset");
    let update = |spec: Value, more: Value| {
        let mut request = json!({ "spec": spec });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    let torpor = json!({ "dispatch": "torpor", "eviction": "torpor" });
    admin.ok("UpdatePolicy", update(torpor.clone(), json!({ "dryRun": true })));
    assert_eq!(admin.ok("ListPolicyChanges", json!({})), json!({}), "a dry run stores nothing");
    let unchanged = json!({ "resourceVersion": 0 });
    let first = admin.ok("UpdatePolicy", update(torpor.clone(), unchanged.clone()));
    assert_eq!((&first["generation"], &first["updatedBy"]), (&json!("1"), &json!("anonymous")));
    eventually("the node applies the policy", || {
        let node = admin.ok("GetPolicy", json!({}))["nodes"][0].clone();
        (&node["obeys"], &node["actual"]["dispatch"]) == (&json!(true), &json!("torpor"))
    });
    let lalb = json!({ "dispatch": "lalb-o3", "overtakesMax": 7 });
    for stale in [json!({ "resourceVersion": 1 }), unchanged] {
        let stale = update(lalb.clone(), stale);
        assert_eq!(admin.refused("UpdatePolicy", stale), Reason::Conflict);
    }
    let masked =
        json!({ "updateMask": "dispatch,overtakesMax", "resourceVersion": first["resourceVersion"] });
    let second = admin.ok("UpdatePolicy", update(lalb, masked));
    let spec = json!({ "dispatch": "lalb-o3", "overtakesMax": 7, "eviction": "torpor" });
    assert_eq!(second["spec"], spec, "fields outside the mask stay");
    let unread = update(json!({ "overtakesMax": 7 }), json!({}));
    assert_eq!(admin.refused("UpdatePolicy", unread), Reason::InvalidSpec);
    let bound = update(json!({ "dispatch": "native" }), json!({}));
    assert_eq!(admin.refused("UpdatePolicy", bound), Reason::InvalidSpec);
    admin.ok("UpdatePolicy", json!({}));
    eventually("the node has the default preset", || {
        admin.ok("GetPolicy", json!({}))["nodes"][0]["actual"]["dispatch"] == "unified"
    });
    let changes = admin.ok("ListPolicyChanges", json!({ "pageSize": 2 }))["changes"].clone();
    assert_eq!((&changes[0]["generation"], &changes[1]["spec"]), (&json!("3"), &spec));
    eventually("the changes are reported as events", || {
        let events = admin.ok("ListEvents", json!({ "pageSize": 1000 }))["events"].clone();
        let told = |event: &&Value| event["reason"] == "PolicyChanged";
        let messages = events.as_array().unwrap().iter().filter(told).map(|it| it["message"].to_string());
        let messages: Vec<_> = messages.collect();
        messages.len() == 3 && messages[1].contains("dispatch torpor -> lalb-o3")
    });
}

/// Tests operations: a drain that cannot end, because there is no other node, and is cancelled; and
/// refused calls.
fn operations(admin: &ReflectionClient) {
    let nodes = admin.ok("ListNodes", json!({}));
    let name = nodes["nodes"][0]["name"].as_str().unwrap();
    let draining =
        admin.ok("SetNodeScheduling", json!({ "name": name, "scheduling": "NODE_SCHEDULING_DRAINING" }));
    let id = json!({ "id": draining["operation"] });
    let operation = admin.ok("GetOperation", id.clone());
    assert_eq!((&operation["kind"], &operation["total"]), (&json!("DrainNode"), &json!("1")));
    let waited = admin.ok("WaitOperation", json!({ "id": draining["operation"], "timeout": "0.1s" }));
    assert_eq!(waited["state"], "OPERATION_STATE_RUNNING", "no other node accepts the function");
    assert_eq!(admin.ok("CancelOperation", id.clone())["state"], "OPERATION_STATE_CANCELLED");
    let ended = admin.ok("WaitOperation", json!({ "id": draining["operation"], "timeout": "20s" }));
    assert!(ended["endedAt"].is_string());
    let node = admin.ok("ListNodes", json!({}))["nodes"][0].clone();
    assert_eq!(node["scheduling"], "NODE_SCHEDULING_CORDONED");
    admin.ok("SetNodeScheduling", json!({ "name": name, "scheduling": "NODE_SCHEDULING_SCHEDULABLE" }));
    let all = admin.ok("ListOperations", json!({}))["operations"].clone();
    assert_eq!((all.as_array().unwrap().len(), &all[0]["object"]), (1, &json!(format!("node/{name}"))));
    let profile = admin.ok("ProfileFunction", json!({ "name": "digits" }));
    assert_eq!((&profile["object"], &profile["total"]), (&json!("function/default/digits"), &json!("5")));
    admin.ok("CancelOperation", json!({ "id": profile["id"] }));
    assert_eq!(admin.ok("ListProfiles", json!({})), json!({}), "no GPU is shared");
    assert_eq!(admin.ok("ListOperations", json!({ "running": true })), json!({}));
    assert_eq!(admin.refused("GetOperation", json!({ "id": "999999" })), Reason::OperationNotFound);
    let refused = json!({ "id": 9, "noWait": true });
    assert_eq!(admin.refused("RemoveController", refused), Reason::MembershipRefused);
}

/// Tests partial responses by read masks, and partial updates.
fn masks(admin: &ReflectionClient) {
    let name = json!({ "tenant": "default", "name": "digits", "readMask": "spec.name,generation" });
    let function = admin.ok("GetFunction", name);
    assert_eq!(function, json!({ "spec": { "name": "digits" }, "generation": "1" }));
    let nodes = admin.ok("ListNodes", json!({ "readMask": "gpus.health" }));
    assert_eq!(nodes["nodes"][0]["gpus"][0], json!({ "health": "Up" }));
    for (method, mask) in [("ListFunctions", "spec.nam"), ("ListTenants", "name.x"), ("ListBilling", "cost")]
    {
        assert_eq!(admin.refused(method, json!({ "readMask": mask })), Reason::MalformedRequest, "{method}");
    }
    let capped = json!({ "name": "acme", "quota": { "gpuShare": 0.5 }, "updateMask": "gpuShare" });
    assert_eq!(admin.ok("SetTenant", capped)["quota"], json!({ "gpusMax": 1, "gpuShare": 0.5 }));
}

/// Tests the log lines of the processes.
fn logged(admin: &ReflectionClient) {
    let began = json!({ "filter": { "atLeast": "LEVEL_INFO" } });
    let page = admin.ok("ListLogs", began);
    let lines = page["lines"].as_array().unwrap();
    assert!(lines.iter().any(|line| line["message"] == "worker started"), "{page}");
    assert!(lines.iter().all(|line| line["process"] == "up"), "a single process serves everything");
    let seqs: BTreeSet<_> = lines.iter().map(|line| line["seq"].to_string()).collect();
    assert_eq!(
        seqs.len(),
        lines.len(),
        "each line once, though the controller and the worker both return it"
    );
    let rest = admin.ok("ListLogs", json!({ "after": page["next"] }));
    let again = |line: &Value| seqs.contains(&line["seq"].to_string());
    assert!(!rest["lines"].as_array().is_some_and(|lines| lines.iter().any(again)), "{rest}");
    assert_eq!(admin.refused("ListLogs", json!({ "of": ["worker-99"] })), Reason::NodeNotFound);
    assert_eq!(admin.refused("ListLogs", json!({ "after": "elsewhere" })), Reason::MalformedRequest);
}

/// Tests the records of the request: bills, activity, events and traces.
fn seen(admin: &ReflectionClient, up: &RunningCluster) {
    let of_tenant = json!({ "tenant": "default" });
    eventually("the request is billed", || {
        admin.ok("ListBilling", of_tenant.clone())["bills"][0]["requests"] == "1"
    });
    eventually("all counting processes are included", || {
        let activity = admin.ok("GetActivity", of_tenant.clone())["activity"].clone();
        let processes = activity["processes"].as_array().unwrap().len();
        (&activity["functions"][0]["answered"], processes) == (&json!("1"), 2)
    });
    let events = admin.ok("ListEvents", json!({ "pageSize": 1 }));
    assert_eq!((events["events"].as_array().unwrap().len(), events["next"].is_string()), (1, true));
    assert_eq!(admin.refused("GetTrace", json!({ "id": "nobody" })), Reason::TraceNotFound);
    eventually("the trace of the request is complete", || {
        let trace = admin.call("GetTrace", json!({ "id": "mine" }));
        trace.is_ok_and(|trace| trace["spans"].as_array().is_some_and(|spans| spans.len() > 3))
    });
    assert!(!up.said().contains("panicked"));
}
