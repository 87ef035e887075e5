//! The device's timeline: sections are in order, within the time that the host measured, and graphs contain none.

use std::time::Instant;

use candle_core::DType;
use moe_kernels::cuda::{Graph, Timeline};
use moe_kernels::{Exec, linear_into};

use crate::common::cuda;

/// Some work: a product with 34 MB of weights.
fn work(ex: &mut Exec) {
    let x = ex.zeros(DType::BF16, &[64, 4096]).unwrap();
    let w = ex.zeros(DType::BF16, &[4096, 4096]).unwrap();
    let mut out = ex.zeros(DType::F32, &[64, 4096]).unwrap();
    linear_into(x.view(), w.view(), None, out.view_mut(), ex).unwrap();
}

#[test]
fn sections_lie_in_order_within_the_time_of_the_host() {
    let origin = Instant::now();
    let timeline = Timeline::new(origin, &cuda()).unwrap();
    let mut ex = cuda().with_timeline(Some(timeline.clone()));
    let micros = || origin.elapsed().as_secs_f64() * 1e6;
    let mut before = 0.;
    for step in 0..20 {
        let launched = Instant::now();
        let launched_us = micros();
        ex.mark("first", step).unwrap();
        work(&mut ex);
        ex.mark("second", step).unwrap();
        work(&mut ex);
        ex.mark("end", 0).unwrap();
        ex.synchronize().unwrap();
        let marks = timeline.take();
        assert_eq!(marks.len(), 3);
        let sections = timeline.sections(marks, launched).unwrap();
        let names: Vec<_> = sections.iter().map(|s| (s.what, s.index)).collect();
        assert_eq!(names, [("first", step), ("second", step)]);
        for section in &sections {
            assert!(
                section.start_us >= before - 1e-6 && section.duration_us > 0.5,
                "{section:?} after {before}"
            );
            before = section.start_us + section.duration_us;
        }
        assert!(
            sections[0].start_us >= launched_us - 1. && before <= micros() + 1.,
            "{sections:?} from {launched_us}"
        );
    }
    assert_eq!(timeline.sections(Vec::new(), origin).unwrap(), []);
}

#[test]
fn what_is_recorded_into_a_graph_is_not_marked() {
    let timeline = Timeline::new(Instant::now(), &cuda()).unwrap();
    let mut ex = cuda().with_timeline(Some(timeline.clone()));
    let mut out = ex.zeros(DType::F32, &[64]).unwrap();
    let mut graph = Graph::capture(&mut ex, |ex| {
        ex.mark("inside", 0)?;
        moe_kernels::fill_into(3.0, out.view_mut(), ex)
    })
    .unwrap();
    assert!(timeline.take().is_empty());
    graph.launch().unwrap();
    assert_eq!(ex.to_host(out.view()).unwrap().view().to_f32_vec().unwrap(), [3.0; 64]);
}
