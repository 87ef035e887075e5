//! The JSON formats.

use moe_eplb::heat::{Stage, StageFilter};
use moe_eplb::json::{HeatRecord, TraceReader, TraceWriter, read_expert_map, trace_loads, write_expert_map};
use moe_eplb::{Error, Placement, Topology};

fn record(step: u64, stage: Stage, layer: usize, counts: &[u64]) -> HeatRecord {
    HeatRecord { step, stage, layer, counts: counts.to_vec() }
}

#[test]
fn traces_round_trip() {
    let records = [
        record(0, Stage::Prefill, 0, &[9, 9]),
        record(0, Stage::Prefill, 1, &[9, 9]),
        record(1, Stage::Decode, 0, &[1, 2]),
        record(1, Stage::Decode, 1, &[3, 4]),
    ];
    let mut text = Vec::new();
    let mut writer = TraceWriter::new(&mut text);
    records.iter().for_each(|r| writer.write(r).unwrap());
    let first = text.split(|&b| b == b'\n').next().unwrap();
    assert_eq!(first, br#"{"v":1,"step":0,"stage":"prefill","layer":0,"counts":[9,9]}"#);
    let read: Vec<_> = TraceReader::new(&text[..]).map(Result::unwrap).collect();
    assert_eq!(read, records);
    let loads = trace_loads(TraceReader::new(&text[..]), StageFilter::Decode).unwrap();
    assert_eq!((loads.steps(), loads.layers(), loads.experts()), (1, 2, 2));
    assert_eq!(loads.layer(1), [3.0, 4.0]);
}

#[test]
fn bad_traces_name_the_line() {
    let read = |text: &str| trace_loads(TraceReader::new(text.as_bytes()), StageFilter::All);
    let good = r#"{"v":1,"step":0,"stage":"decode","layer":0,"counts":[1,2]}"#;
    let at = |error: Error| match error {
        Error::Format { line, .. } => line,
        other => panic!("{other}"),
    };
    assert_eq!(at(read(&format!("{good}\n\nnot json\n")).unwrap_err()), 3);
    let newer = good.replace("\"v\":1", "\"v\":2");
    assert!(read(&newer).unwrap_err().to_string().contains("version 2"));
    assert_eq!(read(""), Err(Error::Empty("recorded steps")));
    // A repeated layer, a missing one, and other experts.
    assert!(read(&format!("{good}\n{good}\n")).is_err());
    let other_layer = good.replace("\"layer\":0", "\"layer\":1");
    let next_step = good.replace("\"step\":0", "\"step\":1");
    assert!(read(&format!("{good}\n{other_layer}\n{next_step}\n")).is_err());
    assert!(read(&format!("{good}\n{}\n", next_step.replace("[1,2]", "[1]"))).is_err());
}

#[test]
fn layers_beyond_all_numbers_are_refused() {
    let read = |text: &str| trace_loads(TraceReader::new(text.as_bytes()), StageFilter::All);
    let good = r#"{"v":1,"step":0,"stage":"decode","layer":0,"counts":[1,2]}"#;
    let line = |layer: usize| good.replace("\"layer\":0", &format!("\"layer\":{layer}"));
    let error = read(&format!("{good}\n{}\n", line(usize::MAX))).unwrap_err();
    assert!(matches!(error, Error::Format { line: 2, .. }), "{error}");
    assert!(error.to_string().contains(&format!("layer {}: expected at most", usize::MAX)), "{error}");
    // The largest number that is accepted as a layer. The other layers of the step are missing, and no memory is
    // allocated for them.
    let error = read(&line(usize::MAX - 1)).unwrap_err().to_string();
    assert!(error.contains("does not hold each of"), "{error}");
}

/// The number of lines times the first line's experts would need 2 TB, far more than the lines contain.
#[test]
fn a_trace_asks_for_no_more_memory_than_it_is_long() {
    let line = |step: u64, counts: &[u64]| {
        let mut text = Vec::new();
        TraceWriter::new(&mut text).write(&record(step, Stage::Decode, 0, counts)).unwrap();
        text
    };
    let mut text = line(0, &vec![0; 1 << 20]);
    (1..1 << 18).for_each(|step| text.extend(line(step, &[1])));
    let error = trace_loads(TraceReader::new(&text[..]), StageFilter::All).unwrap_err();
    assert_eq!(error, Error::Shape { what: "counts", expected: 1 << 20, got: 1 });
}

#[test]
fn expert_maps_round_trip() {
    let topology = Topology::new(3, 4, 2).unwrap();
    let placement = Placement::from_phy2log(&topology, 2, vec![0, 1, 2, 0, 1, 2, 0, 1]).unwrap();
    let map = write_expert_map(&placement);
    assert_eq!(map["moe_layer_count"], 2);
    assert_eq!(map["layer_list"][0]["device_list"][1]["device_expert"][0], 2);
    assert_eq!(read_expert_map(&map, 3).unwrap(), (topology, placement));
    let mut wrong = map.clone();
    wrong["moe_layer_count"] = 3.into();
    assert!(read_expert_map(&wrong, 3).is_err());
    let mut uneven = map.clone();
    uneven["layer_list"][1]["device_list"][0]["device_expert"] = serde_json::json!([0]);
    assert!(read_expert_map(&uneven, 3).is_err());
    assert!(read_expert_map(&map, 2).is_err(), "expert 2 of 2");
}
