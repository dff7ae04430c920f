// Runs in the audio thread: joins the microphone's short blocks into pieces and hands them over.

class Recorder extends AudioWorkletProcessor {
  constructor(options) {
    super();
    this.piece = new Float32Array(options.processorOptions.length);
    this.filled = 0;
  }

  process([[samples]]) {
    for (let start = 0; samples && start < samples.length;) {
      const part = samples.subarray(start, start + this.piece.length - this.filled);
      this.piece.set(part, this.filled);
      this.filled += part.length;
      start += part.length;
      if (this.filled === this.piece.length) {
        this.port.postMessage(this.piece.slice());
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);
