// Asks a server by one pool of connections, for two tenants in turns, and prints how many answers were right.
// usage: pool ADDRESS REQUESTS
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"
)

// A body of which the client does not know the length, so that it is sent in chunks.
type unknown struct{ io.Reader }

type answer struct{ Outputs []struct{ Data []float64 } }

func ask(client *http.Client, address string, number int) error {
	text := fmt.Sprintf(`{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[%d,1]}]}`, number)
	var body io.Reader = bytes.NewReader([]byte(text))
	if number%3 == 0 {
		body = unknown{body}
	}
	request, err := http.NewRequest("POST", "http://"+address+"/v2/models/identity/infer", body)
	if err != nil {
		return err
	}
	request.Header.Set("X-Tenant", []string{"acme", "globex"}[number/11%2])
	if number%5 == 0 {
		request.Header.Set("Expect", "100-continue")
	}
	if number%7 == 0 {
		request.Header["X-Forwarded-For"] = []string{"192.0.2.1", "192.0.2.2"}
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	var found answer
	if response.StatusCode != 200 || json.Unmarshal(data, &found) != nil || found.Outputs[0].Data[0] != float64(number) {
		return fmt.Errorf("request %d: %d %s", number, response.StatusCode, data)
	}
	return nil
}

func main() {
	count, _ := strconv.Atoi(os.Args[2])
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8, ExpectContinueTimeout: 1e9}}
	var all sync.WaitGroup
	var lock sync.Mutex
	right := 0
	for worker := 0; worker < 8; worker++ {
		all.Add(1)
		go func(first int) {
			defer all.Done()
			for number := first; number < count; number += 8 {
				err := ask(client, os.Args[1], number)
				lock.Lock()
				if err == nil {
					right++
				} else {
					fmt.Println(err)
				}
				lock.Unlock()
			}
		}(worker)
	}
	all.Wait()
	fmt.Println(right, "right")
}
